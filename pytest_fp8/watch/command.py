"""``pytest-fp8 watch -- COMMAND``: runs a training script as it is, and says what it computed in FP8. No torch here."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pytest_fp8.codes import R, W
from pytest_fp8.errors import Fp8Error, refuse
from pytest_fp8.watch import FOLDER, RUNNING
from pytest_fp8.watch.judge import OFF, ON, Note, Training, judge
from pytest_fp8.watch.report import groups, plain, report, told, unknown, verdict_of

DESCRIPTION = """\
Run a training script as it is and say what it computed in FP8: share of the work, layers, recipe, one step's account.
The script's output and exit code stay its own; the report goes to stderr. Exit code: the script's. With --expect fp8,
where the script ended well: 0, FP8 is on (--share: to this part of the FLOPs); 1, it is not; 2, that could not be seen.
"""
INJECTED = Path(__file__).parent / "inject"
WRONG, UNANSWERED = 1, 2
SECONDS = 10
"""From SIGTERM to SIGKILL, with --stop."""


def add_watch(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    add = commands.add_parser(
        "watch",
        help="what a training script computes in FP8, as it is",
        description=DESCRIPTION,
        usage="pytest-fp8 watch [--expect fp8] [--share 0.7] [--json FILE] [--stop] -- COMMAND",
    )
    add.add_argument("--expect", choices=["fp8"], help="make the exit code say whether FP8 is on")
    add.add_argument("--share", type=float, default=0.0, help="with --expect: the least share of FLOPs in FP8, 0 to 1")
    add.add_argument("--json", type=Path, metavar="FILE", help="what was said, as docs/watch.md describes it")
    add.add_argument("--stop", action="store_true", help="end the script once its evidence is complete")
    add.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command, as it is typed without watch")
    add.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and report; gives the exit code."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        refuse(R.BAD_VALUE, "no command to watch", next_step="pytest-fp8 watch -- python train.py")
    if not 0 <= options.share <= 1:
        refuse(R.BAD_VALUE, "--share is a part of 1", seen=str(options.share), next_step="--share 0.7")
    if options.share and options.expect is None:
        refuse(R.BAD_VALUE, "--share asks nothing by itself", next_step=f"--expect fp8 --share {options.share}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        refuse(R.NOT_WRITABLE, "--json is in no folder", seen=str(options.json), next_step="make the folder first")
    with TemporaryDirectory(prefix="fp8-watch-") as folder:
        code = watched(command, Path(folder), options.stop)
        trainings = [judge(evidence) for evidence in evidence_in(Path(folder))]
    found = groups(trainings)
    for group in found:
        print("", *report(group), sep="\n", file=sys.stderr)
    if not found:
        said = "no process of it made a step with an optimizer of torch, or none could be observed"
        print("", *unknown(Note(W.NO_TRAINING, said)), sep="\n", file=sys.stderr)
    if code:
        print(*told("", f"the command ended with exit code {code}"), sep="\n", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(plain(found, command, code), indent=1) + "\n")
    if options.expect is None or code:
        return code
    return answer([verdict_of(group) for group in found], options.share)


def answer(leads: Sequence[Training], share: float) -> int:
    """The exit code of ``--expect fp8``: the worst training decides."""
    short = [each for each in leads if each.verdict == ON and (each.share or 0) < share]
    for each in short:
        line = f"{W.BELOW_SHARE}: {each.share:.1%} of the FLOPs in FP8, expected {share:.0%}"
        print(*told("", line), sep="\n", file=sys.stderr)
    if short or any(each.verdict == OFF for each in leads):
        return WRONG
    return 0 if leads and all(each.verdict == ON for each in leads) else UNANSWERED


def evidence_in(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        with suppress(ValueError):
            yield json.loads(path.read_text())


def watched(command: Sequence[str], folder: Path, stop: bool) -> int:
    """Run the command to its end, or with ``stop`` until all of its processes have told what they saw."""
    path = os.environ.get("PYTHONPATH")
    environment = {
        # Otherwise torch's profiler writes two lines of its own to the script's output.
        "KINETO_LOG_LEVEL": "6",
        **os.environ,
        "PYTHONPATH": f"{INJECTED}{os.pathsep}{path}" if path else str(INJECTED),
        FOLDER: str(folder),
    }
    try:
        # Ctrl-C and job control reach the script as without watch; only who is to be ended has a group of its own.
        process = subprocess.Popen(command, env=environment, process_group=0 if stop else None)
    except OSError as error:
        raise Fp8Error(
            R.NOT_STARTED, f"the command did not start: {error}", seen=command[0], next_step="its path"
        ) from None
    with handed_on(process):
        while True:
            try:
                code = process.wait(1 if stop else None)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                if complete(folder):
                    end(process)
                    return 0
            except KeyboardInterrupt:
                # The script got it as well, and decides itself when it ends; one in a group of its own did not.
                if stop:
                    process.send_signal(signal.SIGINT)


@contextmanager
def handed_on(process: subprocess.Popen[Any]) -> Iterator[None]:
    """SIGTERM and SIGHUP, which end this process alone otherwise, go to the script."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda sent, _: process.send_signal(sent)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def complete(folder: Path) -> bool:
    """Whether each process that began to train, and each of its ranks here, has finished its evidence."""
    found = list(evidence_in(folder))
    ranks = [each.get("here", 1) for each in found]
    return bool(found) and len(found) >= max(ranks) and all(each["state"] != RUNNING for each in found)


def end(process: subprocess.Popen[Any]) -> None:
    """End the script and what it started: its process group, which is its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        limit = time.monotonic() + SECONDS
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit - time.monotonic())
            return
