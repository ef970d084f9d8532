"""Some of the catalogue of arms that misbehave; the whole of it is for `python -m benchmarks.faults catalogue`."""

from __future__ import annotations

import os

import pytest

from benchmarks.faults.catalogue import try_one
from benchmarks.faults.misbehaviours import CATALOGUE
from helpers.arms import spec
from pytest_fp8.arms import process
from pytest_fp8.arms.process import LOG_LINES, ArmProcess, tail_of
from pytest_fp8.shipping import ship, unship

pytestmark = pytest.mark.slow

EACH_COMMIT = [
    "os._exit(0)",
    "reads address 0",
    "text on its socket",
    "a fork that returns twice",
    "dies and leaves a child that holds its socket",
    "closes every file descriptor",
    "an exception whose text raises",
    "a fork that stays, in a session of its own",
    "fills its temporary folder with folders of mode 000",
]
"""One a kind: an end, a channel, an exception, what it leaves running, what it leaves on the disk."""
NIGHTLY = [
    "an answer of 2**40 bytes",
    "half an answer, and no more",
    "prints 200 MB in lines, then dies",
    "prints escape sequences, then dies",
    "becomes the program sleep",
    "KeyboardInterrupt",
    "an exception with escape sequences",
    "an exception with lone surrogates",
    "no more files (RLIMIT_NOFILE)",
    "raises where its output goes to a full disk",
    "a program that stays, in a session of its own",
    "deletes its temporary folder, then dies",
    "makes its socket non-blocking",
]
QUICK = [*EACH_COMMIT, *(pytest.param(what, marks=pytest.mark.nightly) for what in NIGHTLY)]
BY_WHAT = {wrong.what: wrong for wrong in CATALOGUE}


def test_the_catalogue_is_long_and_each_of_its_names_is_one():
    assert len({wrong.what for wrong in CATALOGUE}) == len(CATALOGUE) >= 50


@pytest.mark.parametrize("what", QUICK)
def test_a_misbehaviour_is_one_error_with_its_cause_and_leaves_nothing(what):
    assert try_one(BY_WHAT[what], fork=True).faults == []


def test_temporary_files_of_an_arm_lie_in_its_own_folder():
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())

        def where(model):
            import tempfile

            return tempfile.mkdtemp()

        made = unship(arm.request("call", function=ship(where, "a function")))
        assert made.startswith(f"{arm.folder}/")
    finally:
        arm.close()
    assert not os.path.exists(made)


@pytest.mark.nightly
def test_a_temporary_folder_with_a_very_long_name_works(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    monkeypatch.setattr("pytest_fp8.arms.scratch._made", [])
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())
        assert arm.folder.is_relative_to(deep)
        assert arm.request("layers")["converted"]
    finally:
        arm.close()


@pytest.mark.parametrize(
    ("code", "output", "cause"),
    [
        (1, "", "as os._exit() does"),
        (1, "Traceback (most recent call last):\n", "an exception outside"),
        (1, '  File "library.py", line 9, in load\n    import missing\n' * 40, "an exception outside"),
        (1, 'Current thread 0x1 (most recent call first):\n  File "train.py", line 9 in loss\n', "as os._exit() does"),
        (-9, "", "out-of-memory killer"),
        (-11, "", "a library crashed"),
        (-10, "", "sent this signal"),
        (-6, "gloo: op.preamble.length <= op.nbytes. 64 vs 32", "ranks called other collectives"),
    ],
)
def test_the_cause_of_an_end_follows_from_its_code_and_output(code, output, cause):
    assert cause in process.cause_of(code, output)


def test_the_end_of_an_output_is_its_last_lines_or_last_stack(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}\x1b[31m\x07" for i in range(1000)))
    assert tail_of(log).splitlines()[-1] == "line 999[31m"
    assert len(tail_of(log).splitlines()) == LOG_LINES
    idle = ["Thread 0x01 (most recent call first):", "  in idle", ""]
    stack = ["Current thread 0x00007f (most recent call first):", *(f'  File "x.py", line {i}' for i in range(100))]
    log.write_text("\n".join(["before"] * 50 + idle + stack))
    assert tail_of(log).splitlines()[:2] == stack[:2]
    fatal = ["Fatal Python error: Segmentation fault", ""]
    log.write_text("\n".join(fatal + stack))
    assert tail_of(log).splitlines()[:4] == fatal + stack[:2]


FULL = """
    import errno, os, pytest, tempfile
    from torch import nn, randn
    from pytest_fp8 import Workload

    @pytest.fixture(autouse=True)
    def full(monkeypatch):
        def mkdir(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(tempfile, "mkdtemp", mkdir)

    @pytest.fixture
    def fp8_workload():
        return Workload(lambda: nn.Linear(32, 32), batch=lambda step: randn(16, 32), loss=lambda m, x: m(x).sum())

    @pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True)
    def test_fp8(fp8_pair):
        fp8_pair.assert_layers()
"""


def test_a_full_temporary_folder_is_one_clear_error(pytester):
    pytester.makepyfile(FULL)
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["FP8-R08: the arm 'own-bf16-emulated on cpu' could not be started: No space left*", "*expected:*folder below*"]
    )
    result.stdout.no_fnmatch_line("*Error:*mkdir*")
