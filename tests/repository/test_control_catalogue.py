"""The catalogue of controls is whole, its arms are kept apart from healthy ones, and on a GPU, which is not there, its
controls are held against baselines."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from control_runner import ControlRunner
from controls.catalogue import BLOCK, CATALOGUE, page
from controls.control import ANYWHERE, CONSTRUCTED, CONTROLS, Control, Outcome, control
from helpers.baselines import baseline
from helpers.fakes import H200, install
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.baselines.store import Folder, read_baseline
from pytest_fp8.case import QUESTIONS
from pytest_fp8.codes import R, S
from pytest_fp8.options import Settings
from pytest_fp8.plain import from_plain, to_plain
from pytest_fp8.suites_command import SELFTEST

ROOT = Path(__file__).parents[2]


def test_no_two_controls_have_one_id():
    with pytest.raises(ValueError, match="'fp8-off'"):
        control("fp8-off", R.UNKNOWN_GPU)


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
    hooks = {"converted", "optimizer_made", "before_step", "stepped"}
    methods = hooks | {name for name in vars(Engine) if not name.startswith("__")}
    broken_by = [name for name in methods if getattr(control, name, None) is not getattr(Control, name, None)]
    assert broken_by, "it breaks nothing"


def test_the_code_of_a_control_that_not_every_machine_runs_for_each_commit_has_a_test():
    each_commit = {control.code for control in CATALOGUE if not control.nightly and control.runs() != "gpu"}
    texts = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    others = {control.code for control in CATALOGUE} - each_commit
    assert [code for code in others if f"{type(code).__name__}.{code.name}" not in texts] == []


def test_the_selftest_needs_no_gpu_and_takes_a_control_of_most_questions():
    taken = [CONTROLS[name] for name in SELFTEST]
    assert {control.runs() for control in taken} == {ANYWHERE, "emulated"}
    assert {control.question for control in taken} >= {"layers", "numerics", "loss", "checkpoints", "session"}


def test_the_docs_hold_the_catalogue():
    held = BLOCK.search((ROOT / "docs/controls.md").read_text())
    assert held is not None
    assert held[0] == page(), "cd suites && python -m controls.catalogue"


NAMED = type("Named", (Control,), {"code": R.UNKNOWN_GPU, "about": "v100"})
BOTH_SLOWER = CONTROLS["both-slower"]


@pytest.mark.parametrize(
    ("control", "verdict", "code", "message", "caught"),
    [
        (NAMED, "FAIL", R.UNKNOWN_GPU, "v100", True),
        (NAMED, "INVALID", R.UNKNOWN_GPU, "v100", False),
        (NAMED, "FAIL", R.NOT_STARTED, "v100", False),
        (NAMED, "FAIL", R.UNKNOWN_GPU, "h100", False),
        # Where both arms are slower nothing but that is meant.
        (BOTH_SLOWER, "PASS", None, "1.2x; above baseline 1.200x less 2%", True),
        (BOTH_SLOWER, "PASS", None, "1.2x", False),
        (BOTH_SLOWER, "INVALID", S.OTHER_REFERENCE, "", True),
        (BOTH_SLOWER, "INVALID", S.OTHER_PROCESS, "", False),
        (BOTH_SLOWER, "FAIL", S.SLOWER_THAN_BASELINE, "above baseline 1.200x less 2%", False),
    ],
)
def test_a_control_is_caught_by_its_verdict_its_code_and_its_words(control, verdict, code, message, caught):
    assert Outcome(control, verdict, message, code).caught is caught


def test_a_broken_arm_is_never_shared_with_a_healthy_one(monkeypatch):
    install(monkeypatch, H200)
    pool = ArmPool(H200)
    case = Case("1b", "torchao", "tensorwise")
    healthy, broken = PairArms(case, pool, None), PairArms(case, pool, None, "", CONTROLS["fp8-slower"].path())
    slower = BOTH_SLOWER.path()
    both = PairArms(case, pool, None, "", slower, slower)
    assert len({healthy.fp8.key, broken.fp8.key, both.fp8.key}) == 3
    assert healthy.bf16.key == broken.bf16.key != both.bf16.key
    assert from_plain(ArmSpec, to_plain(broken.fp8.spec)) == broken.fp8.spec
    assert "control controls.catalogue:fp8-slower" in broken.fp8.spec.name


@pytest.mark.parametrize("name", ["fp8-slower", "both-slower", "memory-up"])
def test_the_gpu_controls_are_held_against_the_stored_baselines(name):
    case = CONTROLS[name].case
    stored = read_baseline(Folder(ROOT / "baselines"), "h200", case.id, case.digest())
    assert stored is not None
    assert stored.values({"memory-up": "memory_ratio"}.get(name, "speedup"))


@pytest.mark.parametrize(
    ("name", "world", "caught"),
    [
        ("fp8-slower", {"slower": {("", "fp8"): 0.031}}, True),
        ("both-slower", {"slower": {("", "fp8"): 0.1, ("", "bf16"): 0.1}}, True),
        # Within what references differ by, both are as fast beside each other as they were.
        ("both-slower", {"slower": {("", "fp8"): 0.01, ("", "bf16"): 0.01}}, True),
        ("memory-up", {"fp8_memory": 150}, True),
        ("fp8-slower", {}, False),
        ("memory-up", {}, False),
    ],
)
def test_an_arm_that_got_worse_than_its_baseline_is_caught_and_none_is_written(monkeypatch, name, world, caught):
    arms = install(monkeypatch, H200, speedup=1.2, **world).processes
    written, metrics = [], {"speedup": [[math.log(1.2)] * 12] * 4, "memory_ratio": [0.9]}
    monkeypatch.setattr("pytest_fp8.baselines.store.write_atomically", lambda *file: written.append(file))
    monkeypatch.setattr("control_runner.read_baseline", lambda *where: baseline(where[2], where[3], metrics=metrics))
    pool = ArmPool(H200)
    try:
        outcome = ControlRunner(Settings(reason="first"), lambda: pool, "h200").run(CONTROLS[name])
    finally:
        pool.close()
    assert outcome.caught is caught, outcome.message
    broken = {"fp8" if arm.is_fp8 else "bf16" for arm in arms if arm.spec and arm.spec.control}
    assert broken == {*CONTROLS[name].breaks}
    assert written == []
