"""Mutated baselines: every command and a session's reading refuse them, or read what the untouched file says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from helpers.mutants import mutants, places, some_baselines
from pytest_fp8.baselines.record import digest, parse_baseline
from pytest_fp8.baselines.store import load_baseline, read_baseline
from pytest_fp8.baselines.strict import Unsound, parse
from pytest_fp8.cli import main
from pytest_fp8.errors import BaselineError

ROOT = Path(__file__).parents[1]
COUNT = int(os.environ.get("MUTANTS", "300"))
"""Files in all. 10 000 take about ten minutes: ``MUTANTS=10000 pytest tests/test_mutants.py``."""
SLOWEST = 5.0
"""Seconds of one command, on a machine that does other things too: they take some 20 ms."""
BASELINES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (number > 0))
    for number, path in enumerate(some_baselines(ROOT))
]
SUITE = "from pytest_fp8 import Case\nALL = [Case('1b', 'torchao', 'tensorwise')]\n"


def commands(case, gpu="h200"):
    return (
        ("list",),
        ("list", "--json"),
        ("list", case),
        ("list", case, "--json"),
        ("diff", "old", "baselines"),
        ("diff", "baselines", "old", "--json"),
        ("check", "--gpu", gpu),
        ("check", "--json"),
    )


def answer(arguments):
    """Exit code and output of a command. Whatever is no refusal is raised."""
    out, err = io.StringIO(), io.StringIO()
    began = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["baselines", *arguments])
    assert time.monotonic() - began < SLOWEST
    out.getvalue().encode()
    return code, out.getvalue(), err.getvalue()


def read(folder, true):
    """What a session reads of the case, or ``None`` where it is refused."""
    try:
        return read_baseline(folder, "h200", true.case, true.case_hash)
    except BaselineError as error:
        said = error.message
    assert all(letter.isprintable() or letter == "\n" for letter in said)
    return None


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites/matrix.py").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("original", BASELINES)
def test_a_mutated_baseline_is_refused_or_reads_as_the_untouched_one(project, original):
    true, text = load_baseline(original), original.read_text()
    path = project / "baselines/h200" / original.name
    for folder in ("baselines", "old"):
        (project / folder / "h200").mkdir(parents=True)
        shutil.copy(original, project / folder / "h200")
    asked = commands(original.stem)
    untouched = {arguments: answer(arguments)[:2] for arguments in asked}
    seen = set()
    for index, (way, data) in enumerate(mutants(text, COUNT // 3, seed=len(text))):
        path.write_bytes(data)
        found = read(project / "baselines", true)
        # A forger can sign what a measurement could have given. Whoever cannot is refused, or changed nothing.
        assert way == "signed" or found in (None, true), f"mutant {index}"
        seen.add("refused" if found is None else "untouched" if found == true else "signed")
        arguments = asked[index % len(asked)]
        code, said, error = answer(arguments)
        assert code in (0, 1, 2)
        assert "Traceback" not in said + error
        if found is None and arguments[0] in ("list", "diff") and way != "signed":
            assert code == 2, (arguments, said)
        if found == true and arguments in untouched:
            assert (code, said) == untouched[arguments]
    assert seen >= {"refused", "signed"}


@pytest.mark.parametrize("original", BASELINES)
def test_every_field_of_a_baseline_is_checked(original):
    """Whatever stands in a file, a value of another kind in its place is refused although the digest fits."""
    text = original.read_text()
    fields = [index for index, (_, key) in enumerate(places(json.loads(text))) if key != "digest"]
    for index in fields:
        for stranger in (object.__name__ * 200, [{"x": 1}], {"x": [1]}):
            data = json.loads(text)
            holder, key = list(places(data))[index]
            holder[key] = stranger
            data["digest"] = digest(data)
            with pytest.raises(Unsound):
                parse_baseline(parse(json.dumps(data)))
