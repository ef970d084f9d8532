"""Every misbehaviour in an arm of its own: one clear error with its cause, in time, in little memory, nothing left."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.misbehaviours import ANSWERS, Misbehaviour
from pytest_fp8 import Case, Workload
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.shipping import ship, unship

LIMIT_SECONDS = 8.0
"""Of each request."""
GRACE_SECONDS = 5.0
"""How much longer pytest may take to end it."""
ORPHAN_SECONDS = 2.0
MOST_MEGABYTES = 64
"""By which the largest memory of this process may grow; an answer of 40 MB may take more."""
LARGE_ANSWER_MEGABYTES = 400
LONGEST_MESSAGE = 20_000
CASE = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True)

KINDS = {R.ARM_DIED: "died", R.ARM_HUNG: "hung", R.UNREADABLE_ANSWER: "unreadable", R.NOT_STARTED: "not started"}
"""How an arm ended that did not raise."""


def build() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def batch(step: int) -> Any:
    import torch

    return torch.randn(16, 32)


def loss(model: Any, batch: Any) -> Any:
    return (model(batch) - batch).float().pow(2).mean()


@dataclass
class Seen:
    """What one misbehaviour ended in."""

    what: str
    kind: str
    headline: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0
    children: list[int] = field(default_factory=list)
    """Processes that it started and left."""
    faults: list[str] = field(default_factory=list)
    """What is not as it should be."""


def try_one(wrong: Misbehaviour, fork: bool) -> Seen:
    """Do it in a fresh arm; then ask another one, which must be sound."""
    arm = ArmProcess(fork=fork)
    seen = Seen(wrong.what, "")
    try:
        arm.build(ArmSpec(CASE, "cpu", Workload(build=build, batch=batch, loss=loss).ship("a fault"), threads=1))
        _misbehave(arm, wrong, seen)
    finally:
        start = time.monotonic()
        arm.close()
        if (took := time.monotonic() - start) > GRACE_SECONDS:
            seen.faults.append(f"closed in {took:.1f} s")
    if arm.folder.exists():
        seen.faults.append(f"left {[str(path) for path in arm.folder.rglob('*')][:3]}")
    left = [(f"process {pid}", partial(runs, pid)) for pid in seen.children]
    left.append(("a process of the arm's", lambda: bool(users_of(arm.folder))))
    seen.faults += [f"{what} is left" for what, there in left if not ends(there)]
    return seen


def _misbehave(arm: ArmProcess, wrong: Misbehaviour, seen: Seen) -> None:
    # A function of this file's, so that it travels whole.
    do = wrong.do
    before, start = peak_megabytes(), time.monotonic()
    error, result = _ask(arm, do)
    seen.seconds, seen.megabytes = time.monotonic() - start, peak_megabytes() - before
    seen.kind = KINDS.get(error.code, "raised") if error is not None else ANSWERS
    _judge(seen, wrong, error)
    if error is not None:
        if arm.alive != (seen.kind == "raised"):
            seen.faults.append(f"alive afterwards: {arm.alive}")
        return
    if wrong.later:
        time.sleep(1.0)
    error, _ = _ask(arm, lambda: 3)
    if bool(wrong.later) != (error is not None) or wrong.later not in (error.message if error else ""):
        seen.faults.append(f"the next request: {error.headline if error else 'answered'}")
    if wrong.leaves:
        seen.children.append(result)


def _judge(seen: Seen, wrong: Misbehaviour, error: ArmError | None) -> None:
    if seen.kind != wrong.ends:
        seen.faults.append(f"{seen.kind}, expected: {wrong.ends}")
    if seen.seconds > LIMIT_SECONDS + GRACE_SECONDS:
        seen.faults.append(f"{seen.seconds:.1f} s")
    if seen.megabytes > (LARGE_ANSWER_MEGABYTES if wrong.ends == ANSWERS else MOST_MEGABYTES):
        seen.faults.append(f"{seen.megabytes:.0f} MB")
    if error is None:
        return
    seen.headline = error.headline
    if wrong.says not in error.message:
        seen.faults.append(f"the message lacks {wrong.says!r}")
    if len(error.message) > LONGEST_MESSAGE:
        seen.faults.append(f"a message of {len(error.message)} characters")
    if any(ord(char) < 32 and char not in "\n\t" for char in error.message):
        seen.faults.append("the message has control characters")
    with contextlib.suppress(UnicodeEncodeError):
        error.message.encode()
        return
    seen.faults.append("the message is no text that can be written")


def _ask(arm: ArmProcess, do: Any) -> tuple[ArmError | None, Any]:
    try:
        return None, unship(arm.request("call", LIMIT_SECONDS, function=ship(lambda model: do(), "a function")))
    except ArmError as error:
        return error, None


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ends(there: Callable[[], bool], seconds: float = ORPHAN_SECONDS) -> bool:
    """Whether something is gone within this time: that which orphans may take."""
    deadline = time.monotonic() + seconds
    while there() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not there()


def runs(pid: int) -> bool:
    """Whether a process runs. One that has ended and waits for its parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def users_of(folder: Path) -> list[int]:
    """Processes whose environment or output names the folder."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            outputs = [os.readlink(process / f"fd/{number}") for number in (1, 2)]
            named = os.fsencode(folder) in (process / "environ").read_bytes()
            if named or any(output.startswith(f"{folder}/") for output in outputs):
                found.append(int(process.name))
    return found
