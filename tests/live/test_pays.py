"""Where FP8 pays: what is recommended of figures written by hand, and the whole question with fake arms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.fakes import H200, FakeProcess, install
from pytest_fp8 import ArmError, Case, Verdict
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.questions.pays import (
    BF16,
    Advice,
    Alone,
    Gain,
    Group,
    GroupGain,
    InRecipe,
    LayerClass,
    advised,
    fused_share,
    gains_of,
)
from pytest_fp8.recipes import ROLES
from pytest_fp8.report.record import CaseNotes, Notes

Q, K, DOWN = (
    LayerClass(f"layers.0.{name}", f"layers.*.{name}", 64, 64, 128, 16, ROLES)
    for name in ("q_proj", "k_proj", "down_proj")
)
CLASSES = [Q, K, DOWN]
STEP = 100.0


def net(q, k, down, shared=0.0):
    """q and k share an input."""
    return [GroupGain((0, 1), [Gain(q, 0.0), Gain(k, 0.0)], shared), GroupGain((2,), [Gain(down, 0.0)], 0.0)]


@pytest.mark.parametrize(
    ("gains", "advice"),
    [
        ({"tensorwise": net(3, 1, 5)}, Advice("tensorwise")),
        ({"tensorwise": net(3, -2, 5)}, Advice("tensorwise", (K.pattern,), 2)),
        # Less than 0.5 % of the step: two processes differ by that.
        ({"tensorwise": net(3, -0.4, 5)}, Advice("tensorwise")),
        # Each of the two gains beside the other, and both together less than the cast of their input costs.
        ({"tensorwise": net(3, 1, 5, shared=6)}, Advice("tensorwise", (Q.pattern, K.pattern), 2)),
        ({"tensorwise": net(3, 1, 5, shared=3)}, Advice("tensorwise")),
        ({"tensorwise": net(3, -2, 5, shared=2.9)}, Advice("tensorwise", (K.pattern,), 2)),
        ({"tensorwise": net(3, 1, 5), "rowwise": net(2, 1, 1)}, Advice("tensorwise")),
        ({"tensorwise": net(3, 1, 5), "rowwise": net(4, 2, 6)}, Advice("rowwise", (), 3)),
        ({"tensorwise": net(3, 1, 5), "rowwise": net(-4, 5, 8)}, Advice("rowwise", (Q.pattern,), 4)),
        ({"tensorwise": net(3, 1, 5), "rowwise": net(-0.3, 5, 8)}, Advice("rowwise", (), 3.7)),
        (
            {"tensorwise": net(-1, -1, -1), "rowwise": net(-2, -2, -2)},
            Advice(BF16, tuple(each.pattern for each in CLASSES), 3),
        ),
    ],
)
def test_what_the_figures_recommend(gains, advice):
    found = advised(CLASSES, gains, "tensorwise", STEP)
    assert (found.recipe, found.leave) == (advice.recipe, advice.leave)
    if advice.promised:
        assert found.promised == pytest.approx(advice.promised)


def test_a_class_gains_what_leaving_it_out_would_lose_in_all_of_its_calls():
    times = InRecipe(Alone(1.0, 0.9), [Alone(1.5, 0.8), Alone(1.2, 0.6)])
    both = Group((0, 1), Alone(2.0, 0.1), {"tensorwise": times})
    [found] = gains_of([Q, K], [both])["tensorwise"]
    assert [gain.earned for gain in found.gains] == pytest.approx([16 * 0.5, 16 * 0.2])
    assert [gain.casts for gain in found.gains] == pytest.approx([16 * 0.1, 16 * 0.3])
    assert found.shared == pytest.approx(16 * (0.8 - 0.4))
    assert found.all == pytest.approx(16 * (0.7 - 0.8))
    assert found.fused(0.5).all == pytest.approx(16 * (0.7 - 0.4))


@pytest.mark.parametrize(("casts", "share"), [(5.0, 0.5), (20.0, 1.0), (0.0, 0.1), (None, 1.0)])
def test_a_step_pays_no_more_for_casts_than_layers_alone(casts, share):
    account = SimpleNamespace(casts=casts) if casts is not None else None
    assert fused_share(account, [GroupGain((0, 1), [Gain(9.0, 3.0), Gain(9.0, 5.0)], 2.0)]) == share


# -- the question, with fake arms -------------------------------------------------------------------------------------

CASE = Case("1b", "torchao", "tensorwise")
UP_LOSES = {("tensorwise", 768): (0.9, 40.2), ("rowwise", 768): (0.9, 40.2), ("rowwise_with_gw_hp", 768): (0.9, 40.2)}


@pytest.fixture
def ask(monkeypatch):
    pools = []

    def made(case=CASE, **world):
        install(monkeypatch, H200, speedup=1.14, busy=90.0, kernels_alone=True, **world)
        pools.append(ArmPool(H200))
        notes = Notes()
        settings = SimpleNamespace(update=False, strict=False, processes=4)
        arms = PairArms(case, pools[-1], None)
        return Fp8Pair(arms, settings, CaseNotes(notes, case.id, "a model"), None, "file.json"), notes

    yield made
    for pool in pools:
        pool.close()


def built():
    return [process for process in FakeProcess.world.processes if process.spec is not None]


@pytest.mark.parametrize(("left", "word"), [(-0.03, "measured faster"), (0.03, "measured slower"), (0.0, "measured")])
def test_the_recommended_set_is_measured(ask, left, word):
    pair, notes = ask(alone=UP_LOSES, left=left)
    decision = pair.where_it_pays()
    assert decision.verdict is Verdict.PASS
    assert decision.headline.startswith("leaving up_proj in BF16 promises ")
    assert f"; {word}: " in decision.headline
    assert decision.numbers["advice"]["leave"] == ["layers.*.up_proj"]
    assert decision.numbers["change"] == pytest.approx(1 / (1 + left) - 1, abs=0.005)
    assert 0 < decision.numbers["change_error"] < 0.02
    assert [each.verdict for each in notes.answers] == ["PASS"]
    assert pair.where_it_pays().headline == decision.headline
    assert not any(process.alive for process in built() if process.spec.leave)


def test_nothing_is_measured_where_nothing_more_is_promised(ask):
    pair, _ = ask()
    decision = pair.where_it_pays()
    assert "no other set of layers or recipe promises more" in decision.headline
    assert decision.numbers["change"] is None
    assert [each["pattern"] for each in decision.numbers["classes"]] == ["layers.*.q_proj", "layers.*.up_proj"]
    assert not any(process.spec.leave for process in built())


def test_another_recipe_is_measured(ask):
    pair, _ = ask(alone={("rowwise", size): (0.1, 0.1) for size in (256, 768)})
    decision = pair.where_it_pays()
    assert decision.numbers["advice"]["recipe"] == "rowwise"
    assert {process.spec.case.recipe for process in built()} == {"none", "tensorwise", "rowwise"}


def test_an_arm_that_cannot_be_built_is_said_and_is_no_error(ask, monkeypatch):
    pair, _ = ask(alone=UP_LOSES)
    real = FakeProcess.receive

    def fails(self, timeout=0):
        if self.asked is None and self.spec.leave:
            raise ArmError(R.ARM_RAISED, "the arm cannot leave these")
        return real(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", fails)
    assert "not measured: " in pair.where_it_pays().headline


def test_layers_that_are_in_fp8_all_the_same_are_no_proof(ask, monkeypatch):
    pair, _ = ask(alone=UP_LOSES)
    monkeypatch.setattr("helpers.fakes.fnmatchcase", lambda name, pattern: False)
    assert "layers.0.up_proj is in FP8 all the same" in pair.where_it_pays().headline


@pytest.mark.parametrize(
    "case", [Case("micro", "torchao", "tensorwise", emulated=True), Case("1b", "unsloth", "rowwise", lora=16)], ids=str
)
def test_emulated_cases_and_models_of_a_library_are_not_asked(ask, case):
    assert ask(case)[0].where_it_pays().verdict is Verdict.NOT_EXERCISED


def test_a_session_shows_the_table_below_its_cases(pytester, monkeypatch):
    install(monkeypatch, H200, alone=UP_LOSES, busy=90.0)
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[Case("1b", "torchao", "tensorwise")])
        def test_where_fp8_pays(fp8_pair):
            assert fp8_pair.where_it_pays().verdict == "PASS"
        """
    )
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*1b-torchao-tensorwise: leaving up_proj in BF16 promises*", "*earned - casts = net ms*"]
    )
