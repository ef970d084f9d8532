"""The number of the way in which figures are taken. A baseline's session keeps the number that it was taken with."""

from __future__ import annotations

MEASUREMENT = 4
"""Raised when a change of the files in :data:`TAKES_FIGURES` moves a figure that a baseline stores. Baselines of an
older number are still gated on: the session, ``check`` and ``show`` say that they were taken another way.

2: each step no longer waits for the GPU. 3: arms whose step time is not steady within a turn (8B, Transformer Engine at
1B) are timed in longer turns, whose first 1.5 s do not count. 4: what several GPUs work in a step leaves out how long
collectives wait for a late host, and casts what runs beside other kernels; no garbage is collected in profiled steps,
which makes a rank late. Of one GPU nothing moved: in eleven cases on H100s at most 0.02 ms of a step's kernels ran
beside others. Since then FP8 products that no layer needs are not counted: the share of uncompiled torchao cases may be
higher than a stored one, which only gives it room until it is stored anew. And since then each turn of arms that do not
fit the GPU together drops its first 1.5 s: without their first block 8B's speedups on one H100 are 0.1 to 0.3 % lower,
and sessions of one case differ by 0.25 %. And a step's peak no longer counts cuBLAS workspaces, 32 MiB, that products
of other questions left: of two tiny cases whose Linears are all Transformer Engine's 1.41x of BF16 is stored on H100s,
and 1.10x on H200s, whose newest session asked no such question. One is 1.09x now, on an H200, asked either way. And
since then the longer turns of 3 are three a pair, and no longer alternate, as are turns between which arms give their
memory back: in a gate on an H200 four speedups of 8B were 0.1 to 0.4 % lower than stored, where sessions of one case
differ by 0.3 %."""

ONE_GPU = 3
"""The oldest number whose figures of one GPU are today's."""
NO_WAITS = 4
"""The oldest number whose busy times of several GPUs have no waits for late hosts in them."""


def moved_by(number: int, several: bool) -> int:
    """The number that has moved figures of this one since, or 0 where they are taken as today. ``several``: of arms on
    several GPUs."""
    newest = MEASUREMENT if several else ONE_GPU
    if number < newest:
        return newest
    return number if number > MEASUREMENT else 0


TAKES_FIGURES = (
    "gpu.py",
    "arms/together.py",
    "questions/layers/products.py",
    "questions/loss/course.py",
    "questions/loss/evidence.py",
    "questions/memory.py",
    "questions/speed/account.py",
    "questions/speed/evidence.py",
    "questions/speed/host.py",
    "questions/speed/timing.py",
    "worker/answers/busy.py",
    "worker/run/curves.py",
    "worker/answers/memory.py",
    "worker/training/phases.py",
    "worker/training/step.py",
    "worker/answers/timing.py",
    "worker/run/course.py",
    "worker/watch/profile.py",
    "worker/watch/trace.py",
    "worker/watch/wire.py",
)
"""The files whose code takes the figures that baselines store."""

TAKEN_BY = "bc58c43ba5ba750c"
"""Digest of their code, without comments, docstrings and blank lines. ``tests/test_measurement.py`` holds it."""
