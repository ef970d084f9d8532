"""The part of an own model's hash that is the text of its functions: what changes it, and what does not."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pytest_fp8.source_text import OURS, is_library_file, text_of

ROOT = Path(__file__).parent.parent
MODULE = """
import functools
from pytest_fp8 import Workload

RATE = 3

def scaled(k):
    def around(fn):
        @functools.wraps(fn)
        def wrapper(*a): return fn(*a) * k
        return wrapper
    return around

class Loss:
    def __call__(self, model, x):
        return model(x, 2)

@scaled(4)
def build(width=5):
    assert width, "message"
    return f"{width!r:>{width}} {'six'}"

MADE = [lambda step: 7, lambda step: 8]

def workload():
    return Workload(build=functools.partial(build, 9, name="ten"), batch=MADE[0], loss=Loss(), step=lambda *a: (
        a, 11), version=12)

if __name__ == "__main__" or __name__ == "test_made":
    print("HASH", workload().fingerprint("executed"))

def test_says():
    print("HASH", workload().fingerprint("executed"))
"""

EACH = """
import glob, runpy

for path in sorted(glob.glob("made_*.py")):
    runpy.run_path(path, run_name="__main__")
"""


def said(folder, *sources, how=("test_made.py",), **env):
    """The hashes that a process of its own prints of the workloads in these sources; of the one above without any."""
    folder.mkdir(exist_ok=True)
    for number, source in enumerate(sources):
        (folder / f"made_{number}.py").write_text(source)
    (folder / "test_made.py").write_text(EACH if sources else MODULE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **env}
    done = subprocess.run(
        [sys.executable, *how], cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return [line.split()[-1] for line in done.stdout.splitlines() if "HASH" in line]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return said(tmp_path_factory.mktemp("here"))


def test_it_is_the_same_in_every_process_and_folder(tmp_path, made):
    pytest_ = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_made.py")
    assert made == said(tmp_path / "there", PYTHONHASHSEED="2")
    assert made == said(tmp_path, how=("-O", "test_made.py"))
    assert 2 * made == said(tmp_path, how=pytest_), "as it is imported, and in a test"
    assert made == ["a77014c71e15367d"], "with another Python or a changed pytest-fp8 stored baselines are stale"


EDITS = {
    "width=5": "width=6",
    "'six'": "'seven'",
    '"message"': '"other"',
    "x, 2": "x, 3",
    "step: 7": "step: 6",
    "build, 9": "build, 8",
    '"ten"': '"nine"',
    "a, 11": "a, 12",
    "version=12": "version=13",
}


def test_a_change_of_a_function_of_its_arguments_or_of_the_version_is_seen(tmp_path, made):
    assert all(MODULE.count(old) == 1 for old in EDITS)
    found = said(tmp_path, *(MODULE.replace(old, new) for old, new in EDITS.items()))
    assert len(found) == len({*found, *made}) - 1 == len(EDITS)


def test_comments_layout_docstrings_and_neighbours_are_not(tmp_path, made):
    source = MODULE.replace("    assert width", '    "Docstring."\n    # A comment.\n    assert (width)')
    source = source.replace("[lambda step: 7, lambda", "[\n    lambda step: 7,  # seven\n    lambda")
    source = source.replace("step: 8", "step: 9").replace("RATE = 3", "\n\nRATE = 4")
    assert said(tmp_path, source) == made


def one(step):
    return 1


def other(step):
    return 2


def test_a_library_s_function_and_what_has_no_source_count_by_their_names():
    space = {}
    exec("def made(): return 1", space)
    assert text_of(space["made"]) == "made"
    assert text_of(textwrap.dedent) == "dedent"
    assert text_of(len) == "len"
    assert not is_library_file(f"{OURS}shipped/suites/workloads.py"), "the suites from a wheel have the clone's hashes"
    assert text_of(["/a/b/data", 1.5, None]) == text_of(["/c/data", 1.5, None])
    assert text_of(functools.cache(one)) != text_of(functools.cache(other))
