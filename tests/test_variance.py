"""The variance components: found again in what was drawn with them, robust, and stored beside the baselines."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_fp8.baselines.folder import read_folder, readable
from pytest_fp8.baselines.record import Baseline, StoredSession
from pytest_fp8.baselines.review import compare_metric
from pytest_fp8.baselines.source import Folder
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.baselines.variance import NAME, estimated, outdated_components, read_components
from pytest_fp8.cli import main
from pytest_fp8.errors import BaselineError
from pytest_fp8.rules.speed import decide_speedup
from pytest_fp8.rules.variance import BUSY_RUNS, MEASURED, estimate
from pytest_fp8.verdicts import Verdict

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate.recordings import BASELINES, histories, on_busy_time, stored_in

SESSION, PROCESS, BLOCK = 0.004, 0.002, 0.007
NAMES = ("monday", "tuesday", "friday", "sunday")


def drawn(seed=0, cases=40, names=NAMES, processes=4, blocks=8):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(cases):
        level = rng.normal(0.1, 0.1)
        found.append({})
        for name in names:
            middle = level + rng.normal(0, SESSION)
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


def test_busy_times_have_a_sessions_part_of_their_own():
    assert MEASURED.of_busy().session == MEASURED.busy > MEASURED.session
    assert (MEASURED.of_busy().process, MEASURED.of_busy().block) == (MEASURED.process, MEASURED.block)
    assert estimate(drawn()).of_busy().session == MEASURED.busy, "steps say nothing of them"


BUSY_SESSIONS = dict(zip((*sorted(BUSY_RUNS)[:2], "c" * 12, "d" * 12), (1.193, 1.204, 1.181, 1.199), strict=True))
"""Run -> busy speedup. The first two are those that the first figures stand on."""


def busy_baseline(sessions):
    metrics = [
        {
            "busy_speedup": [[math.log(ratio)] * 26] * 2,
            "speedup": [[0.0] * 8] * 2,
            "bf16_ms": [100.0] * 2,
            "fp8_ms": [100.0] * 2,
        }
        for ratio in sessions.values()
    ]
    stored = [
        StoredSession("2026-11-23", "abc", False, "why", {"name": "NVIDIA H200"}, {}, run, measured)
        for run, measured in zip(sessions, metrics, strict=True)
    ]
    return Baseline("1b-te-current", "0" * 16, "h200", tuple(stored))


def test_sessions_that_were_measured_since_count_in_their_gpu_s_own():
    before = estimated([busy_baseline(dict(list(BUSY_SESSIONS.items())[:3]))])
    assert (before["busy"], before["busy_sessions"]) == (MEASURED.busy, MEASURED.busy_sessions)
    after = estimated([busy_baseline(BUSY_SESSIONS)])
    assert after["busy_sessions"] == MEASURED.busy_sessions + 1
    assert MEASURED.busy < after["busy"] < 0.0108, "the two later ones differ by 1.5 %"
    assert (after["session"], after["sessions"]) == (MEASURED.session, MEASURED.sessions), "no step time is among them"
    assert (after["block"], after["blocks"]) == (MEASURED.block, MEASURED.blocks), "nor a block"


def test_what_sessions_of_busy_times_differ_by_is_noise_to_an_update_and_to_a_gate():
    """Transformer Engine at 1B on three H200s, whose hosts let its steps wait by different times."""
    first, second, third = ([[math.log(ratio)] * 26] * 2 for ratio in (1.193, 1.204, 1.181))
    assert not compare_metric("busy_speedup", [first, second], third).moved
    assert compare_metric("speedup", [first, second], third).moved
    lost = [[math.log(1.181)] * 26] * 4
    of_steps, of_busy = (
        decide_speedup(lost, history=[first, second], components=c, floor=None) for c in (MEASURED, MEASURED.of_busy())
    )
    assert of_busy.verdict is Verdict.PASS
    assert of_busy.tolerance > of_steps.tolerance


def test_what_was_measured_first_agrees_with_what_the_repository_s_data_say_today():
    every, on_busy = histories(), on_busy_time(stored_in(BASELINES))
    found = estimate(list(every.values()), prior=None)
    # A busy time is a single step's, which scatters more than blocks do.
    of_steps = estimate([sessions for case, sessions in every.items() if case not in on_busy], prior=None)
    low, high = found.interval("session")
    assert 0.95 * low < MEASURED.session < 1.05 * high
    low, high = of_steps.interval("block")
    assert 0.95 * low < MEASURED.block < 1.2 * high, "later blocks agree better: those of 8B's long steps"
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


def test_a_gpu_s_components_are_of_its_own_histories(folder, capsys):
    assert main(["baselines", "variance", "--dir", str(folder)]) == 0
    alone = (folder / "h200" / NAME).read_bytes()
    [mine] = readable(read_folder(folder)).values()
    for other in ("h100", "l40s"):
        write_baseline(folder, replace(mine, gpu=other))
    assert main(["baselines", "variance", "--gpu", "h100", "--dir", str(folder)]) == 0
    assert main(["baselines", "variance", "--gpu", "h200", "--dir", str(folder)]) == 0
    assert [json.loads(file.read_text())["cases"] for file in sorted(folder.glob(f"*/{NAME}"))] == [1, 1]
    assert (folder / "h200" / NAME).read_bytes() == alone
    (folder / "h100" / NAME).write_text((folder / "h100" / NAME).read_text().replace('"cases": 1', '"cases": 2'))
    files = read_folder(folder)
    assert [found.gpu for found in outdated_components(folder, files)] == ["h100"]
    assert outdated_components(folder, files, "h200") == []


def test_a_gpu_without_a_speed_has_no_components(folder, capsys):
    [mine] = readable(read_folder(folder)).values()
    path = folder / "emulated" / NAME
    session = replace(mine.sessions[0], metrics={"fp8_layers": [4]})
    write_baseline(folder, replace(mine, gpu="emulated", sessions=(session,)))
    path.write_text("{}")
    assert main(["baselines", "variance", "--dir", str(folder)]) == 0
    assert "emulated: no case of it has a speed" in capsys.readouterr().out
    assert not path.exists()
    assert read_components(Folder(folder), "h200").cases == 1
    assert main(["baselines", "variance", "--gpu", "emulated", "--dir", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {}


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
        {"busy": 0},
        {"busy": 0.5},
        {"busy_sessions": None},
        {"sessions": 0},
        {"sessions": 2.5},
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
