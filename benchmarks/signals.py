"""Signals at random times to pytest, to xdist's workers and to arms: what is left of a session, and after it.

    python -m benchmarks.signals [--signals 500] [--seed 0] [--gpu]

On any machine: the arms run on the CPU, but for `--gpu`, where they take this machine's GPU. Prints a line for each
session and a table of the signals, and ends with 1 where a session had a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SUITE = """
import pytest
from pytest_fp8 import Case

GPU = %r
CASES = [
    dict(cases=[Case("tiny" if GPU else "micro", "torchao", recipe, emulated=not GPU)])
    for recipe in ("tensorwise", "rowwise")
]

@pytest.mark.fp8(**CASES[0], question="layers")
def test_layers(fp8_pair):
    fp8_pair.assert_layers()

@pytest.mark.fp8(**CASES[0], question="numerics")
def test_numerics(fp8_pair):
    fp8_pair.assert_numerics()

@pytest.mark.fp8(**CASES[0], question="checkpoints")
def test_checkpoints(fp8_pair):
    fp8_pair.assert_checkpoints()

@pytest.mark.fp8(**CASES[1], question="layers")
def test_other_layers(fp8_pair):
    fp8_pair.assert_layers()
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
VICTIMS = ("pytest", "controller", "worker", "arm")
ARMS_SECONDS = {False: 8.0, True: 25.0}
"""About how long arms work in a session, on a CPU and on a GPU; an undisturbed one took 52 s on H200s whose host
compiled something meanwhile."""
END_SECONDS = 60.0
"""After the signal."""
TABLE = "= FP8 ="
NOT_OURS = ("torchinductor_", "pytest-of-")
"""Folders that torch and pytest keep for the next run."""
WORKER = "exec(eval(sys.stdin.readline()))"
"""In the command with which execnet starts a worker of pytest-xdist."""
ORPHAN_SECONDS = 2.0
"""Within which a process that lost its parent ends."""
NEXT_START = "from pytest_fp8.arms.scratch import session_folder; session_folder()"


@dataclass
class Sent:
    """One signal."""

    victim: str
    number: signal.Signals
    delay: float
    """Seconds after the session's start, or after its first arm's."""
    after_arm: bool
    at: float = 0.0
    """Seconds after the session's start."""
    passed: int = 0
    """Tests that had passed before."""
    hit: bool = False
    """Whether the victim was there."""


@dataclass
class Trial:
    """One session and its signals: some to arms and workers, which it survives, and a last one to pytest."""

    gpu: bool
    workers: bool
    signals: list[Sent]
    ended: int | None = None
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.signals")
    parser.add_argument("--signals", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true", help="arms take the GPU, whose memory must be free after")
    asked = parser.parse_args()
    return int(campaign(asked.signals, asked.seed, asked.gpu) > 0)


def campaign(signals: int, seed: int, gpu: bool = False) -> int:
    """Gives the number of sessions with faults. On a ``gpu`` no session has workers, of which each would need one of
    its own."""
    for number in SIGNALS[:-1]:
        # A shell ignores some of them for what it starts in the background, and what it starts inherits that.
        signal.signal(number, signal.SIG_DFL)
    draw = random.Random(seed)
    counts: Counter[tuple[str, str]] = Counter()
    faults = 0
    # Short: where a socket's name has no room, arms start more slowly.
    with tempfile.TemporaryDirectory(prefix="f-", dir="/tmp") as name:
        base = Path(name)
        length = {workers: _undisturbed(base, gpu, workers) for workers in ((False,) if gpu else (False, True))}
        for workers, seconds in length.items():
            print(f"undisturbed{', with two workers' if workers else ''}: {seconds:.1f} s", flush=True)
        while counts.total() < signals:
            workers = not gpu and draw.random() < 0.5
            trial = Trial(gpu, workers, _drawn(draw, gpu, workers, length[workers]))
            try_one(base, trial, draw)
            faults += bool(trial.faults)
            if trial.ended in (0, 1):
                length[workers] = trial.seconds
            counts.update((sent.victim, sent.number.name) for sent in trial.signals if sent.hit)
            said = ", ".join(
                f"{sent.number.name} to {sent.victim} at {sent.at:.1f} s" for sent in trial.signals if sent.hit
            )
            print(f"{counts.total():4}: {said}: exit {trial.ended}  {'; '.join(trial.faults)}", flush=True)
        _undisturbed(base, gpu, workers=False)
    print(f"\n{'signals to':12}" + "".join(f"{number.name:>10}" for number in SIGNALS))
    for victim in VICTIMS:
        print(f"{victim:12}" + "".join(f"{counts[victim, number.name]:>10}" for number in SIGNALS))
    print(f"{counts.total()} signals: {faults} sessions with faults")
    return faults


def _drawn(draw: random.Random, gpu: bool, workers: bool, whole: float) -> list[Sent]:
    """Two to arms, one to a worker where there are some, and the last one to pytest, at random times. Libraries are
    imported for most of a session, so half of them come while arms work."""
    earlier = [
        Sent(victim, draw.choice(SIGNALS), draw.uniform(0.0, ARMS_SECONDS[gpu]), True)
        for victim in ("arm", "arm", *(["worker"] if workers else []))
    ]
    after_arm = draw.random() < 0.5
    delay = draw.uniform(0.0, ARMS_SECONDS[gpu] if after_arm else whole)
    last = Sent("controller" if workers else "pytest", draw.choice(SIGNALS), delay, after_arm)
    return [*sorted(earlier, key=lambda sent: sent.delay), last]


def try_one(base: Path, trial: Trial, draw: random.Random) -> None:
    held = _gpu_memory() if trial.gpu else 0
    with (
        tempfile.TemporaryDirectory(prefix="fault-session-") as name,
        _started(base, Path(name), trial.gpu, trial.workers) as run,
    ):
        folder, start, first_arm = Path(name), time.monotonic(), float("inf")
        waiting = list(trial.signals)
        while waiting and run.poll() is None:
            now = time.monotonic()
            if first_arm > now and victims(run.pid, "arm"):
                first_arm = now
            due = [sent for sent in waiting if now >= (first_arm if sent.after_arm else start) + sent.delay]
            for sent in due:
                waiting.remove(sent)
                sent.at, sent.passed = now - start, _passed(folder)
                found = sorted(victims(run.pid, sent.victim))
                with contextlib.suppress(ProcessLookupError, IndexError):
                    os.kill(draw.choice(found), sent.number)
                    sent.hit = True
            time.sleep(0.02)
        try:
            trial.ended = run.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            trial.faults.append(f"still runs after {END_SECONDS:.0f} s")
            run.kill()
        trial.seconds = time.monotonic() - start
        _check(base, folder, trial)
        if trial.gpu and not ends(lambda: _gpu_memory() > held):
            trial.faults.append(f"{_gpu_memory() - held} MiB more in use on the GPU than before")


def _gpu_memory() -> int:
    """MiB in use, of all GPUs together."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()))


def _check(base: Path, folder: Path, trial: Trial) -> None:
    if not ends(lambda: bool(users_of(base))):
        trial.faults.append(f"orphans: {[_command(pid) for pid in users_of(base)]}")
    output = (folder / "output").read_text(errors="replace")
    last = trial.signals[-1]
    killed = last.hit and last.number == signal.SIGKILL
    if last.passed and not killed:
        if TABLE not in output:
            trial.faults.append("no table")
        if not (folder / "out" / "report.json").exists():
            trial.faults.append("no report")
    if not last.hit and trial.ended not in (0, 1, 2):
        trial.faults.append("the session ended otherwise than by itself")
    if trial.ended == 0 and _passed(folder) != SUITE.count("def test_"):
        trial.faults.append("green, and not every test has passed")
    if "INTERNALERROR" in output:
        trial.faults.append("INTERNALERROR")
    for path in folder.rglob("*"):
        # A killed one may leave a hidden file, which the next report in this folder removes.
        if path.suffix == ".tmp" and not killed:
            trial.faults.append(f"unfinished: {path.name}")
        if path.suffix == ".json":
            trial.faults += _wrong_in(path)
    environment = {**os.environ, "TMPDIR": str(base)}
    subprocess.run([sys.executable, "-c", NEXT_START], env=environment, check=True)
    if left := [entry.name for entry in base.iterdir() if not entry.name.startswith(NOT_OURS)]:
        trial.faults.append(f"left after the next start: {left}")
    if trial.faults:
        kept = Path(tempfile.gettempdir()) / f"fault-output-{os.getpid()}-{time.time_ns()}"
        kept.write_text(output)
        trial.faults.append(f"output: {kept}")


def _wrong_in(path: Path) -> list[str]:
    """What is wrong in a JSON file: torn, or a verdict that sound arms do not have."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        return [f"torn: {path.name}: {error}"]
    decisions = [entry["decisions"] for entry in content.get("entries", {}).values()] if path.stem == "report" else []
    return [
        f"false verdict: {question} {decision['verdict']}"
        for each in decisions
        for question, decision in each.items()
        if decision["verdict"] != "PASS"
    ]


def _undisturbed(base: Path, gpu: bool, workers: bool) -> float:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name, _started(base, Path(name), gpu, workers) as run:
        if run.wait():
            raise RuntimeError((Path(name) / "output").read_text())
    return time.monotonic() - start


def _started(base: Path, folder: Path, gpu: bool, workers: bool) -> subprocess.Popen[bytes]:
    (folder / "test_faults.py").write_text(SUITE % gpu)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--fp8-report=out"]
    command += ["-n2"] if workers else []
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(base)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def victims(session: int, victim: str) -> set[int]:
    """The processes of a session that a signal may go to."""
    if victim in ("pytest", "controller"):
        return {session}
    below = _below(session)
    arms = {pid for pid in below if _output(pid).endswith("/log")}
    return arms if victim == "arm" else {pid for pid in below if WORKER in _command(pid)}


def _below(pid: int) -> set[int]:
    """All processes that this one started, and theirs."""
    parents = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def _output(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/1")
    return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return ""


def _passed(folder: Path) -> int:
    return (folder / "output").read_text(errors="replace").count("PASSED")


def ends(there: Callable[[], bool], seconds: float = ORPHAN_SECONDS) -> bool:
    """Whether something is gone within this time."""
    deadline = time.monotonic() + seconds
    while there() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not there()


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


if __name__ == "__main__":
    sys.exit(main())
