"""The catalogue of controls, all of them.

``cd suites && python -m controls.catalogue`` writes its table into docs/controls.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from controls import arms, checkpoints, conversion, loss, products, ranks, scripts, speed, without_arms  # noqa: F401
from controls.control import CONTROLS, GPU, Control

CATALOGUE: tuple[type[Control], ...] = tuple(sorted(CONTROLS.values(), key=lambda control: str(control.code)))
EACH_COMMIT = """
env-unread model-unprepared odd-layer-stops second-name recipe-dropped head-converted hook-dropped weight-scaled
weights-in-bf16 bias-dropped layer-bypassed forward-only wgrad-bf16 half-in-bf16 recompute-bf16 eval-off
other-data half-batch-step gradient-through-e4m3 tf32-one-arm no-autocast reference-waits fp8-arm-in-eval
head-float32 recomputes-alone recomputes-otherwise epsilon-of-an-own-norm seeds-again other-rate gradients-rounded
teacher-stands-still e5m2-for-e4m3 dgrad-x2 wgrad-rows-permuted
gradient-underflow input-of-the-step-before bias-gradient-mean gradients-x4 scaled-gradient fp8-off bf16-by-hooks
off-after-ten-steps nan-step-40 one-weight-frozen batches-carry-on stored-in-fp8 optimizer-lost tie-broken
schedule-restarts buffers-lost save-leaves-eval script-off script-batch script-hangs foreign-baseline all-skipped
"""
"""Of those that need no GPU: one of each kind. The others run each night."""
for _control in CATALOGUE:
    _control.nightly = _control.runs() != GPU and _control.id not in EACH_COMMIT.split()
PAGE = Path(__file__).parents[2] / "docs/controls.md"
BLOCK = re.compile(r"(?<=<!-- catalogue -->\n).*?(?=<!-- end -->)", re.S)


def __getattr__(id: str) -> type[Control]:
    """A control by its id: an arm's process finds its class so (:meth:`Control.path`)."""
    try:
        return CONTROLS[id]
    except KeyError:
        raise AttributeError(f"no control has the id {id!r}") from None


def page() -> str:
    """What docs/controls.md holds between its marks: how many there are, and a row for each."""
    seen = sum(control.source != "constructed" for control in CATALOGUE)
    gpu = [control for control in CATALOGUE if control.runs() == GPU]
    commit = sum(not control.nightly for control in CATALOGUE if control not in gpu)
    several = ", ".join(f"`{control.id}`" for control in gpu if control.case.gpus > 1)
    lines = [
        f"There are {len(CATALOGUE)}. {seen} were seen: in a library's source or tracker, in a user's report, or in "
        "this project's own runs ([measurements](measurements.md)). The others are *constructed*: faults that the gate "
        "must see and of which no report is known.",
        "",
        f"{len(CATALOGUE) - len(gpu)} run on any machine, on emulated FP8 or without an arm: `tox -e suite` runs "
        f"{commit} of them, one of each kind, and `tox -e nightly` the others. {len(gpu)} need a GPU, {several} two.",
        "",
        "| control | what is broken | found by | as | seen |",
        "|---|---|---|---|---|",
    ]
    for control in CATALOGUE:
        found = " or ".join(control.verdicts).replace("_", " ")
        where = f"{control.question}{' (GPU)' * (control in gpu)}"
        lines.append(f"| {control.id} | {control.title} | {where} | {found}: `{control.code}` | {control.source} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # Run as a program, this module is another one than the arms import; the table is the same.
    PAGE.write_text(BLOCK.sub(lambda _: page(), PAGE.read_text()))
