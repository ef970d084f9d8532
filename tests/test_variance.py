"""The variance components: found again in what was drawn with them, robust, and stored beside the baselines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pytest_fp8.baselines.record import Baseline, StoredSession
from pytest_fp8.baselines.source import Folder
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.baselines.variance import NAME, read_components
from pytest_fp8.cli import main
from pytest_fp8.errors import BaselineError
from pytest_fp8.rules.variance import MEASURED, estimate

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate.recordings import histories

SESSION, PROCESS, BLOCK = 0.004, 0.002, 0.007
NAMES = ("monday", "tuesday", "friday", "sunday")


def drawn(seed=0, cases=40, names=NAMES, shared=0.0, processes=4, blocks=8):
    rng = np.random.default_rng(seed)
    together = {name: rng.normal(0, SESSION * shared**0.5) for name in names}
    found = []
    for _ in range(cases):
        level = rng.normal(0.1, 0.1)
        found.append({})
        for name in names:
            middle = level + together[name] + rng.normal(0, SESSION * (1 - shared) ** 0.5)
            each = middle + rng.normal(0, PROCESS, (processes, 1))
            found[-1][name] = (each + rng.normal(0, BLOCK, (processes, blocks))).tolist()
    return found


def test_components_are_found_again():
    found = estimate(drawn(seed=1), prior=None)
    assert found.session == pytest.approx(SESSION, rel=0.15)
    assert found.process == pytest.approx(PROCESS, rel=0.3)
    assert found.block == pytest.approx(BLOCK, rel=0.05)
    assert (found.sessions, found.processes, found.cases) == (120, 480, 40)
    low, high = found.interval("session")
    assert low < SESSION < high


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_what_the_cases_of_a_session_share_is_told_from_each_case_s_own(shared):
    found = [estimate(drawn(seed, shared=shared), prior=None).shared for seed in range(8)]
    assert np.mean(found) == pytest.approx(shared, abs=0.2)


def test_one_wild_case_in_ten_hardly_moves_them():
    histories = drawn()
    for history in histories[:3]:
        for name, session in history.items():
            wild = 20 * (NAMES.index(name) - 1.5) * SESSION
            history[name] = [[x + wild for x in process] for process in session]
    assert estimate(histories, prior=None).session < 1.6 * SESSION


def test_few_sessions_fall_back_on_what_was_measured_so_far():
    one = estimate(drawn(names=NAMES[:1]))
    assert (one.session, one.sessions) == (MEASURED.session, MEASURED.sessions)
    assert one.process == pytest.approx(PROCESS, rel=0.4)
    two = estimate(drawn(cases=2, names=NAMES[:2]))
    assert two.sessions == MEASURED.sessions + 2
    many = estimate(drawn())
    assert abs(many.session - SESSION) < abs(many.session - MEASURED.session)
    assert estimate([]) == MEASURED.__class__(**{**vars(MEASURED), "cases": 0})


def test_what_was_measured_first_agrees_with_what_the_repository_s_data_say_today():
    found = estimate(list(histories().values()), prior=None)
    for name in ("session", "block"):
        low, high = found.interval(name)
        assert 0.95 * low < getattr(MEASURED, name) < 1.05 * high
    assert 0 < found.process <= MEASURED.process, "later processes agree better"


# -- beside the baselines ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    [history] = drawn(cases=1, names=NAMES[:1])
    processes = [[x - 0.1 for x in process] for process in history["monday"]]
    ratios = [float(np.exp(np.median(process))) for process in processes]
    metrics = {"speedup": processes, "bf16_ms": [100.0 * r for r in ratios], "fp8_ms": [100.0] * len(ratios)}
    session = StoredSession("2026-11-22", "abc", False, "first", {"name": "NVIDIA H200"}, {}, "0" * 12, metrics)
    write_baseline(tmp_path, Baseline("1b-x", "0" * 16, "h200", (session,)))
    return tmp_path


def test_the_command_stores_components_that_the_gate_reads(folder, capsys):
    assert read_components(Folder(folder), "h200") == MEASURED
    assert main(["baselines", "variance", "--dir", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "between sessions: 0.34%" in said
    assert f"wrote {folder / 'h200' / NAME}" in said
    stored = read_components(Folder(folder), "h200")
    assert (stored.cases, stored.session) == (1, MEASURED.session)
    content = json.loads((folder / "h200" / NAME).read_text())
    assert content["from"]["sessions"] == [f"2026-11-22 abc {'0' * 12}"]
    before = (folder / "h200" / NAME).read_bytes()
    assert main(["baselines", "variance", "--gpu", "h200", "--dir", str(folder)]) == 0
    assert (folder / "h200" / NAME).read_bytes() == before
    assert main(["baselines", "list", "--dir", str(folder)]) == 0, "no baseline, and no broken one"


def test_a_gpu_without_baselines_is_one_error(folder, capsys):
    assert main(["baselines", "variance", "--gpu", "h100", "--dir", str(folder)]) == 2
    assert "no baselines of h100" in capsys.readouterr().err


def test_components_that_are_not_the_histories_own_are_an_error_of_the_check(folder, tmp_path, capsys):
    suite = tmp_path / "matrix.py"
    suite.write_text("from pytest_fp8 import Case\nALL = [Case('1b', 'torchao', 'tensorwise')]\n")
    check = ["baselines", "check", "--dir", str(folder), "--suite", str(suite), "--json"]

    def kinds():
        capsys.readouterr()
        main(check)
        return [finding["kind"] for finding in json.loads(capsys.readouterr().out)]

    assert main(["baselines", "variance", "--dir", str(folder)]) == 0
    assert "variance" not in kinds()
    path = folder / "h200" / NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"session": 0.019}))
    assert "variance" in kinds()


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": float("nan")},
        {"session": 0.5},
        {"session": 0},
        {"process": -0.001},
        {"block": "0.01"},
        {"sessions": 0},
        {"sessions": 2.5},
        {"shared": 2},
        {"cases": True},
        {"more": 1},
    ],
    ids=str,
)
def test_components_that_cannot_be_believed_are_refused(folder, wrong):
    main(["baselines", "variance", "--dir", str(folder)])
    path = folder / "h200" / NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(BaselineError, match="does not hold variance components") as error:
        read_components(Folder(folder), "h200")
    assert "pytest-fp8 baselines variance" in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"session": 1e-3', "null"])
def test_a_file_that_is_no_such_file_is_refused(folder, text):
    (folder / "h200" / NAME).write_text(text)
    with pytest.raises(BaselineError):
        read_components(Folder(folder), "h200")
