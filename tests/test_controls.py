"""The catalogue of controls is whole, its arms are kept apart from healthy ones, and its GPU half does what it says."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import ClassVar

import pytest

from control_runner import ControlRunner, SmallArms
from controls.catalogue import CATALOGUE
from controls.control import ANYWHERE, GPU
from helpers.fakes import H200, FakeProcess, install, timed
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.arms.stopwatch import Stopwatch
from pytest_fp8.baselines.store import load_baseline, read_baseline
from pytest_fp8.case import QUESTIONS
from pytest_fp8.errors import ArmError
from pytest_fp8.options import Settings
from pytest_fp8.plain import from_plain, to_plain
from pytest_fp8.questions.layers.check import COUNTED
from pytest_fp8.questions.layers.evidence import WireTime
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.worker.run.fault_points import FaultPoints, fault_points_of

ROOT = Path(__file__).parent.parent
BY_ID = {control.id: control for control in CATALOGUE}


def test_all_are_there_once_and_in_order():
    assert [control.number for control in CATALOGUE] == list(range(1, len(CATALOGUE) + 1))
    assert len(BY_ID) == len(CATALOGUE)


@pytest.mark.parametrize("control", CATALOGUE, ids=lambda control: control.id)
def test_a_control_says_what_it_breaks_and_who_must_name_it(control):
    assert re.fullmatch(r"[a-z0-9-]+", control.id)
    assert control.title
    assert control.source
    assert vars(control)["__doc__"], "how it is broken here"
    assert control.question in (*QUESTIONS, "faster", "baseline", "session", "precision")
    assert control.cause or "PASS" in control.verdicts, "a control that must fail names its cause"
    assert (control.case is None) == (control.runs() == ANYWHERE)
    assert set(control.breaks) <= {"fp8", "bf16"}
    if control.case is not None:
        question = "speedup" if control.question == "faster" else control.question
        assert control.case.asks(question), "its case can answer its question"


@pytest.mark.parametrize("control", [c for c in CATALOGUE if c.case is not None], ids=lambda control: control.id)
def test_the_arm_of_a_control_is_broken_by_the_class_that_its_spec_names(control):
    assert type(fault_points_of(control.path())) is control
    points = [name for name in vars(FaultPoints) if not name.startswith("__")]
    assert any(getattr(control, name) is not getattr(FaultPoints, name) for name in points), "it breaks nothing"


def test_an_arm_without_a_control_has_fault_points_that_change_nothing():
    assert type(fault_points_of(None)) is FaultPoints


def test_a_control_that_cannot_be_imported_is_an_error():
    with pytest.raises(ImportError):
        fault_points_of("nowhere.at_all:Control")
    with pytest.raises(AttributeError):
        fault_points_of("controls.training:NoSuchControl")


def test_the_catalogue_loads_no_torch():
    code = "import sys; from controls.catalogue import CATALOGUE; print(len(CATALOGUE), 'torch' in sys.modules)"
    path = {"PYTHONPATH": f"{ROOT / 'suites'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(CATALOGUE)), "False"]


def test_each_control_has_its_test_in_the_suite(pytester):
    listed = pytester.runpytest_subprocess(str(ROOT / "suites/test_controls.py"), "--collect-only", "-q")
    for control in CATALOGUE:
        assert f"test_control[{control.number:02d}-{control.id}]" in listed.stdout.str()


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
    assert "control controls.training:ThreePerCentSlower" in broken.fp8.spec.name


def test_the_gpu_controls_are_held_against_the_stored_baselines():
    for name in ("fp8-slower", "both-slower", "memory-up"):
        case = BY_ID[name].case
        stored = read_baseline(ROOT / "baselines", "h200", case.id, case.digest())
        assert stored is not None
        assert stored.values({"memory-up": "memory_ratio"}.get(name, "speedup"))


# -- the GPU half, on a GPU that is not there: arms answer by hand as a broken arm would ------------------------------

BF16_MS = 120.0


def stored_speedup(recipe: str) -> float:
    """What the repository's own baseline says of 1B with torchao, so that new ones need no change here."""
    path = ROOT / f"baselines/h200/1b-torchao-{recipe}.json"
    values = load_baseline(path).values("speedup") if path.exists() else [[0.0]]
    return math.exp(median(median(process) for process in values))


FACTORS = {
    "fp8-slower": 1.031,
    "both-slower": 1.1,
    "no-compile": 2.7,
    "half-the-batch": 0.55,
    "tf32-alone": 0.5,
    "reference-reads": 1.33,
    "reference-sleeps": 1.5,
    "no-optimizer-step": 0.94,
    "slow-wire": 1.3,
}
"""Control -> how much longer its broken arm's step takes."""


class BrokenProcess(FakeProcess):
    """Answers as an H200's arm that the control of its spec breaks; timings as stored for 1B with torchao."""

    @property
    def control(self):
        """The id of the control."""
        return next((control.id for control in CATALOGUE if control.path() == self.spec.control), None)

    def receive(self, timeout=0):
        building, answer = self.asked is None, super().receive(timeout)
        facts = {"compiled": self.control != "no-compile", "first_step": ""}
        return {**answer, **facts} if building else answer

    def blocks(self, count, steps, dropped):
        slower = FACTORS.get(self.control, 1.0)
        base = BF16_MS / (stored_speedup(self.spec.case.recipe) if self.is_fp8 else 1.0)
        times = [base * slower * float(1 + self.noise.normal(0, 0.002)) for _ in range(count)]
        return timed(times, count * (self.control == "compiled-in-blocks"))

    def layers(self):
        found = super().layers()
        control = self.control
        if control == "slow-attention":
            found["attention"] = {"sdpa": ["fmha_cutlassF"]}
        self._break_account(found, control)
        if control == "amax-frozen":
            found["stale_amax"] = found["converted"]
        if control == "recompute-outside":
            for product in found["products"]:
                if product["phase"] != "forward":
                    product.update(kind="bfloat16", kernel=found["families"]["bfloat16"][0])
        if control == "wrong-library":
            found["kinds"] = dict.fromkeys(found["converted"], "torchao.float8.float8_linear.Float8Linear")
            found["live_fp8"] = []
        return found

    def _break_account(self, found, control):
        """The profile of a step of 113 ms, 7 ms of them the optimizer's, with what the control changes in it."""
        spent = found["milliseconds"]
        spent.update(rest=spent["rest"] - 7, optimizer=7.0)
        found.update(step_ms=[115.0] * 5, busy_ms=[113.0] * 5, compute_ms=[113.0] * 5)
        if control == "half-the-batch":
            for name in ("fp8 products", "other products", "attention", "rest"):
                spent[name] /= 2
            spent["busy"] = 60.0
        if control == "no-optimizer-step":
            spent.update(optimizer=0.0, busy=106.0)
        if self.spec.case.gpus > 1:
            gathered = 30.0 if control == "slow-wire" else 2.0
            row = WireTime("all-gather", "bfloat16", 24, 10**9, 2 * 10**9, gathered)
            found.update(wire=[to_plain(row)], exposed_ms=gathered, compute_ms=[113.0 - gathered] * 5)
            spent.update(communication=gathered)
        if self.spec.case.name == "float_head":
            head = 10.0 if control == "tf32-alone" else 60.0
            product = Product("forward", 4096, (4096, 8192), "float32", "mm", milliseconds=head)
            found["products"].append(to_plain(product))
            spent.update({"other products": spent["other products"] + head, "busy": spent["busy"] + head})
        if control == "reference-reads":
            found["waits"] = {"cudaStreamSynchronize": 1}
        if control in ("reference-reads", "reference-sleeps"):
            found["step_ms"] = [BF16_MS * FACTORS[control]] * 5

    def save(self, folder, store, optimizer):
        keeps = self.is_fp8 and self.spec.case.recipe == "delayed"
        return {**super().save(folder, store, optimizer), "scaling_state": ["q_proj._extra_state"] if keeps else []}

    def carry_scales(self, folder):
        stored, new = ({"q_proj scale_fwd": digest} for digest in (7, 0))
        loaded = new if self.control == "scales-not-loaded" else stored
        return {
            "stored": stored,
            "reset": new,
            "loaded": loaded,
            "fresh": stored,
            "no_place": 0,
            "refused": "",
            "failed": "",
        }

    def memory(self):
        peaks = super().memory()
        if self.control == "memory-up":
            peaks = {**peaks, "peak_allocated": peaks["peak_allocated"] * 5 // 3}
        return peaks


def read_without_counts(*where):
    """A baseline without its counts of layers: the fake model has two FP8 layers, the baselines' models 28 and 112."""
    found = read_baseline(*where)
    if found is None:
        return None
    kept = {name: values for name, values in found.newest.metrics.items() if name not in COUNTED}
    return replace(found, sessions=(replace(found.newest, metrics=kept),))


@pytest.fixture
def pool():
    made = ArmPool(H200)
    yield made
    made.close()


@pytest.fixture
def runner(monkeypatch, pool):
    install(monkeypatch, H200, busy=113.0)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", BrokenProcess)
    monkeypatch.setattr("pytest_fp8.arms.pool.RankedProcess", lambda ranks, *more: BrokenProcess(*more[:3]))
    monkeypatch.setattr("control_runner.read_baseline", read_without_counts)
    return ControlRunner(Settings(baseline_dir=ROOT / "baselines"), lambda: pool, "h200")


@pytest.mark.parametrize("control", [c for c in CATALOGUE if c.runs() == GPU], ids=lambda control: control.id)
def test_a_gpu_control_is_caught_where_its_arm_does_what_it_says(runner, control):
    outcome = runner.run(control)
    assert outcome.caught, outcome.message


def test_a_healthy_arm_is_called_none_of_these(runner):
    for control in CATALOGUE:
        if control.runs() == GPU and control.id != "both-slower":
            outcome = runner.run(type("Healthy", (control,), {"breaks": ()}))
            assert not outcome.caught, f"{control.id}: {outcome.message}"


@pytest.mark.usefixtures("runner")
def test_running_a_control_writes_no_baseline(pool, monkeypatch):
    written = []
    monkeypatch.setattr("pytest_fp8.baselines.store.write_atomically", lambda *file: written.append(file))
    made = ControlRunner(Settings(baseline_dir=ROOT / "baselines", update=True), lambda: pool, "h200")
    assert made.run(BY_ID["fp8-slower"]).caught, "held against the baseline, not stored as one"
    assert written == []


def test_an_arm_that_cannot_be_built_leaves_nothing_behind_for_the_next_control(monkeypatch):
    watch = Stopwatch()
    small, healthy = SmallArms(fork=False, stopwatch=watch), Case("micro", "torchao", "tensorwise", emulated=True)
    broken = replace(healthy, weights="/nowhere")
    monkeypatch.setattr("control_runner.ArmProcess", FakeArm)
    try:
        pair = PairArms(healthy, small, None)
        with pytest.raises(ArmError, match="nowhere"):
            PairArms(broken, small, None).start()
        assert FakeArm.open == 0
        pair.start()
        assert [FakeArm.built[pair.bf16.key], FakeArm.built[pair.fp8.key]] == [1, 1]
        assert (pair.fp8.label, "build") in watch.waited, "the session says where its time went"
    finally:
        small.close()
    assert FakeArm.open == 0


class FakeArm:
    """A process that answers one question at a time, and cannot be built from a folder that is not there."""

    built: ClassVar[Counter[str]] = Counter()
    open = 0

    def __init__(self, fork=False):
        self.alive, self.due = True, None
        FakeArm.open += 1

    def start_build(self, spec):
        assert self.due is None, "asked before it answered"
        self.due = spec

    def receive(self, timeout):
        spec, self.due = self.due, None
        if spec.case.weights:
            raise ArmError("raised", f"no weights in {spec.case.weights}")
        FakeArm.built[make_key(spec)] += 1
        return {}

    def close(self):
        FakeArm.open -= self.alive
        self.alive = False


def make_key(spec):
    return spec.case.digest("")
