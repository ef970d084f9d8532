"""Where a failure is shown, and how the clone runs without the plugin."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.oldest
def test_an_error_is_shown_at_the_line_that_asked(pytester):
    pytester.makepyfile("from pytest_fp8.gpu import known\ndef test_mine():\n    known('x100')")
    result = pytester.runpytest("-p", "no:benchmark")
    result.stdout.fnmatch_lines(
        [
            ">       known('x100')",
            "E  *SettingsError: FP8-R01: *",
            "*.py:3: SettingsError",
        ]
    )
    result.stdout.no_fnmatch_line("*errors.py*")


WRONG = "from pytest_fp8 import Workload\n{}Workload(build=lambda: None, batch=lambda: None)\n"


@pytest.mark.parametrize(("where", "line"), [("def test_mine():\n    ", 3), ("", 2)], ids=["in a test", "in a module"])
def test_a_workload_with_a_wrong_signature_is_one_short_error(pytester, where, line):
    pytester.makepyfile(WRONG.format(where))
    result = pytester.runpytest("-p", "no:benchmark", "-rN")
    result.stdout.fnmatch_lines([f"*.py:{line}:*" if not where else f"*.py:{line}: SettingsError"])
    result.stdout.fnmatch_lines(
        ["E  *SettingsError: FP8-R33: the workload's batch= is no function that can be called as it will be"]
    )
    result.stdout.no_fnmatch_line("*During handling*")
    result.stdout.no_fnmatch_line("*workload.py*")
    assert len(result.outlines) < 32


def test_a_test_that_is_skipped_names_its_own_line_and_what_runs_here(pytester):
    pytester.makepyfile("import pytest\n\n@pytest.mark.fp8(recipe='rowwise')\ndef test_mine(fp8_pair): pass")
    result = pytester.runpytest("-rs", "-p", "no:benchmark")
    if "no NVIDIA GPU" not in result.stdout.str():
        pytest.skip("needs a machine without a GPU")
    result.stdout.fnmatch_lines(["SKIPPED * test_a_test_*.py:3: *emulated=True in its mark runs it on the CPU"])


def test_the_clone_runs_without_the_plugin():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:fp8",
        "-p",
        "no:cacheprovider",
        "tests/unit/test_plain.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
