"""The catalogue of controls is whole, and its arms are kept apart from healthy ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from controls.catalogue import BLOCK, CATALOGUE, page
from controls.control import ANYWHERE, CONSTRUCTED, Control, Outcome
from helpers.controls import BY_ID
from helpers.fakes import H200, install
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.baselines.store import Folder, read_baseline
from pytest_fp8.case import QUESTIONS
from pytest_fp8.codes import R, S
from pytest_fp8.plain import from_plain, to_plain
from pytest_fp8.suites_command import SELFTEST

ROOT = Path(__file__).parent.parent.parent


def test_no_two_controls_have_one_id():
    stated = [path.read_text() for path in (ROOT / "suites/controls").glob("*.py")]
    rows = [row for text in stated for row in re.findall(r"^@?(?:fault|control)\(", text, re.M)]
    assert len(rows) == len(CATALOGUE) == len(BY_ID)


@pytest.mark.parametrize("control", CATALOGUE, ids=lambda control: control.id)
def test_a_control_says_what_it_breaks_and_who_must_name_it(control):
    assert re.fullmatch(r"[a-z0-9-]+", control.id)
    assert control.title
    assert control.source == CONSTRUCTED or control.source.startswith(("[", "report: "))
    assert control.question in (*QUESTIONS, "faster", "baseline", "session", "precision")
    assert control.code, "a control names its cause"
    assert (control.case is None) == (control.runs() == ANYWHERE)
    assert set(control.breaks) <= {"fp8", "bf16"}
    if control.case is not None:
        question = "speedup" if control.question == "faster" else control.question
        assert control.case.asks(question), "its case can answer its question"


@pytest.mark.parametrize(
    "control", [c for c in CATALOGUE if c.case and c.breaks and not c.script], ids=lambda control: control.id
)
def test_the_arm_of_a_control_is_broken_by_the_class_that_its_spec_names(control):
    from pytest_fp8.worker.run.engine import Engine, engine_type

    broken = engine_type(control.path())
    assert issubclass(broken, control)
    assert issubclass(broken, Engine)
    methods = {"converted", "before_step", "stepped", *(name for name in vars(Engine) if not name.startswith("__"))}
    broken_by = [name for name in methods if getattr(control, name, None) is not getattr(Control, name, None)]
    assert broken_by, "it breaks nothing"


def test_the_code_of_a_control_that_runs_each_night_has_a_test_for_each_commit():
    each_commit = {control.code for control in CATALOGUE if not control.nightly}
    texts = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    # Each code of a broken script is shown in test_script.py.
    others = {control.code for control in CATALOGUE if control.nightly and not control.script} - each_commit
    assert [code for code in others if f"{type(code).__name__}.{code.name}" not in texts] == []


def test_the_selftest_needs_no_gpu_and_takes_a_control_of_most_questions():
    taken = [BY_ID[name] for name in SELFTEST]
    assert {control.runs() for control in taken} == {ANYWHERE, "emulated"}
    assert {control.question for control in taken} >= {"layers", "numerics", "loss", "checkpoints", "session"}


def test_the_docs_hold_the_catalogue():
    held = BLOCK.search((ROOT / "docs/controls.md").read_text())
    assert held is not None
    assert held[0] == page(), "cd suites && python -m controls.catalogue"


def test_the_verdict_with_another_code_catches_nothing():
    control = type("Coded", (Control,), {"code": R.UNKNOWN_GPU, "about": "v100"})
    caught = [Outcome(control, "FAIL", said, code).caught for said, code in OUTCOMES]
    assert caught == [True, False, False]
    assert not Outcome(control, "INVALID", *OUTCOMES[0]).caught


OUTCOMES = (("v100", R.UNKNOWN_GPU), ("v100", R.NOT_STARTED), ("h100", R.UNKNOWN_GPU))


def test_the_catalogue_loads_no_torch():
    code = "import sys; from controls.catalogue import CATALOGUE; print(len(CATALOGUE), 'torch' in sys.modules)"
    path = {"PYTHONPATH": f"{ROOT / 'suites'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(CATALOGUE)), "False"]


def test_a_broken_arm_is_never_shared_with_a_healthy_one(monkeypatch):
    install(monkeypatch, H200)
    pool = ArmPool(H200)
    case = Case("1b", "torchao", "tensorwise")
    healthy, broken = PairArms(case, pool, None), PairArms(case, pool, None, "", BY_ID["fp8-slower"].path())
    slower = BY_ID["both-slower"].path()
    both = PairArms(case, pool, None, "", slower, slower)
    assert len({healthy.fp8.key, broken.fp8.key, both.fp8.key}) == 3
    assert healthy.bf16.key == broken.bf16.key != both.bf16.key
    assert from_plain(ArmSpec, to_plain(broken.fp8.spec)) == broken.fp8.spec
    assert "control controls.catalogue:fp8-slower" in broken.fp8.spec.name


@pytest.mark.parametrize(
    ("verdict", "code", "message", "caught"),
    [
        ("PASS", None, "1.2x; -0.1% against the baseline of 4 session(s)", True),
        ("PASS", None, "1.2x", False),
        ("INVALID", S.OTHER_REFERENCE, "", True),
        ("INVALID", S.OTHER_PROCESS, "", False),
        ("FAIL", S.SLOWER_THAN_BASELINE, "-9% against the baseline of 4 session(s)", False),
    ],
)
def test_where_both_arms_are_slower_nothing_but_that_is_meant(verdict, code, message, caught):
    assert Outcome(BY_ID["both-slower"], verdict, message, code).caught is caught


def test_the_gpu_controls_are_held_against_the_stored_baselines():
    for name in ("fp8-slower", "both-slower", "memory-up"):
        case = BY_ID[name].case
        stored = read_baseline(Folder(ROOT / "baselines"), "h200", case.id, case.digest())
        assert stored is not None
        assert stored.values({"memory-up": "memory_ratio"}.get(name, "speedup"))
