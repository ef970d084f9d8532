"""A gate on a user's own script: two runs of it as it is, held at their steps, and what is said of them.

The ways to break such a script are the controls of ``suites/controls/scripts.py``; here they run in forks of one
process that has torch.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from control_runner import ControlRunner
from controls.catalogue import CONTROLS
from controls.scripts import TRAIN, Run, runs
from helpers.arms import all_end
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import C, D, L, R, W
from pytest_fp8.errors import ArmError, SettingsError
from pytest_fp8.options import Settings
from pytest_fp8.plan import FP8, Ask
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.recipes import SCRIPT
from pytest_fp8.script.command import QUESTIONS, Script, read
from pytest_fp8.script.judge import check_losses, check_presence
from pytest_fp8.script.pair import Fp8Script
from pytest_fp8.script.process import ScriptProcess
from pytest_fp8.verdicts import Verdict

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool():
    pool = ArmPool(None)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def forked(python_with_torch):
    """``forked(script)``: the same, run in a fork of a process that has torch."""

    def started(script):
        words = script.command[1:] if script.command[0] == sys.executable else ()
        return replace(script, command=(*python_with_torch.command, *words)) if words else script

    return started


@pytest.fixture(scope="module")
def runner(pool):
    return ControlRunner(Settings(), lambda: pool)


# -- controls, and sound runs beside them -----------------------------------------------------------------------------


BROKEN = ("script-data", "script-rate", "script-memory", "script-raises", "script-no-step", "script-missing")
"""One of each kind: the others are decided from the same evidence, and the suite runs them all each night."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_script_that_is_broken_is_told_with_its_code(runner, forked, name):
    control = CONTROLS[name]
    outcome = runner.run(type(control.id, (control,), {"script": forked(control.script)}))
    assert outcome.caught, outcome.message


@pytest.fixture(scope="module")
def sound(runner, forked) -> Fp8Script:
    """A sound pair. Its FP8 run keeps the layers that it has converted, which is no other work."""
    return runner.script_pair(Run.case, forked(runs("--keep", share=0.9)), {"fp8": "sound"})


def test_fp8_is_on_in_one_run_and_the_work_is_the_same(sound):
    decision = sound.layers()
    assert (decision.verdict, decision.numbers["fp8_share"]) == (Verdict.PASS, pytest.approx(32 / 35))
    assert (decision.numbers["converted"], decision.numbers["linears"]) == (4, 5)
    assert "6 weights before the first step, AdamW, switches, the model's first inputs" in decision.headline
    assert sound.loss().verdict is Verdict.PASS


def test_both_are_timed_in_turns(sound):
    """A host of two cores scatters: what is shown is that blocks alternate, and that the arms stand still between."""
    arms = sound._arms

    def steps():
        return (yield Ask(FP8, "losses", fresh=True, steps=5))

    timer = BlockTimer(arms)
    arms.run(lambda: timer.measure(1, 2))
    assert [len(times) for times in (*timer.reference, *timer.other)] == [4, 4]
    assert all(0.1 < time < 1000 for times in (*timer.reference, *timer.other) for time in times)
    assert arms.run(steps) == arms.run(steps)


def test_a_run_is_as_it_would_be_alone(sound, python_with_torch, tmp_path):
    """Its losses are those of a run that nobody holds."""
    told = Path(TRAIN).read_text().replace("    optimizer.step()\n", "    print(loss.item())\n    optimizer.step()\n")
    (tmp_path / "alone.py").write_text(told)
    python_with_torch.watched(tmp_path / "alone.py", "--steps", "13", FP8_WATCH_STEPS="2")
    held = sound._arms.bf16.request("losses", steps=12)
    assert held == [float(line) for line in (tmp_path / "printed").read_text().split()][1:13]


# -- decisions on evidence --------------------------------------------------------------------------------------------

RAN = {
    "verdict": "ON",
    "code": None,
    "reason": "",
    "fp8_share": 0.8,
    "notes": [],
    "asked": [],
    "in_force": [],
    "roles": {"fprop": 0.8},
    "classes": [
        {"layers": ["up", "down"], "in": 64, "out": 64, "products": {"fprop": {"fp8": 2}, "wgrad": {"fp8": 2}}}
    ],
}
OFF = {**RAN, "verdict": "OFF", "fp8_share": 0.0}
UNSEEN = {**RAN, "verdict": "UNKNOWN", "code": "FP8-W07", "fp8_share": None, "classes": []}
HEAD = {"layers": ["head"], "in": 64, "out": 48, "products": {"fprop": {"float32": 1}}}
FLOAT32 = {**RAN, "classes": [*RAN["classes"], HEAD]}
BFLOAT16 = {**RAN, "classes": [*RAN["classes"], {**HEAD, "products": {"fprop": {"bfloat16": 1}}}]}
LATE = {**RAN, "notes": [{"code": "FP8-W17", "text": "the optimizer holds other weights", "next": "convert first"}]}


@pytest.mark.parametrize(
    ("bf16", "fp8", "more", "verdict", "code"),
    [
        (OFF, RAN, {}, "PASS", None),
        (OFF, OFF, {}, "FAIL", W.FP8_OFF),
        (RAN, RAN, {}, "INVALID", R.BUILT_IN_FP8),
        (OFF, UNSEEN, {}, "INCONCLUSIVE", W.NO_PRODUCTS),
        (UNSEEN, RAN, {}, "INCONCLUSIVE", W.NO_PRODUCTS),
        (OFF, LATE, {}, "FAIL", W.CONVERTED_TOO_LATE),
        ({**BFLOAT16, "verdict": "OFF"}, FLOAT32, {}, "INVALID", D.OTHER_PRECISION),
        ({**FLOAT32, "verdict": "OFF"}, BFLOAT16, {}, "INVALID", D.OTHER_PRECISION),
        ({**FLOAT32, "verdict": "OFF"}, FLOAT32, {}, "PASS", None),
        ({**BFLOAT16, "verdict": "OFF"}, FLOAT32, {"least": 0.9}, "FAIL", W.BELOW_SHARE),
        (OFF, RAN, {"least": 0.9}, "FAIL", W.BELOW_SHARE),
        (OFF, RAN, {"stored": {"fp8_share": 0.9}}, "FAIL", L.LESS_THAN_BASELINE),
        (OFF, RAN, {"stored": {"fp8_wgrad": 3}}, "FAIL", L.LESS_THAN_BASELINE),
        (OFF, RAN, {"stored": {"fp8_share": 0.8, "fp8_wgrad": 2}}, "PASS", None),
    ],
)
def test_presence(bf16, fp8, more, verdict, code):
    decision = check_presence(bf16, fp8, **more)
    assert (decision.verdict.value, decision.code) == (verdict, code)


FALLING = [3.0 - 0.02 * step for step in range(40)]
NOISY = [[loss + 0.001 * math.sin(9 * step + seed) for step, loss in enumerate(FALLING)] for seed in range(4)]


@pytest.mark.parametrize(
    ("fp8", "bf16", "verdict", "code"),
    [
        (NOISY[:1], NOISY[1:2], "PASS", None),
        ([[*FALLING[:-1], math.nan]], NOISY[:1], "FAIL", C.NOT_FINITE),
        (NOISY[:1], [[*FALLING[:-1], math.inf]], "INVALID", C.REFERENCE_NOT_FINITE),
        (NOISY[:1], NOISY[:1], "FAIL", C.BIT_EQUAL),
        ([[0.0] * 9], [[0.0] * 9], "INVALID", C.CONSTANT),
        ([[loss + 1 for loss in FALLING]], NOISY[:1], "PASS", None),
        ([[loss + 1 for loss in curve] for curve in NOISY], NOISY, "FAIL", C.HIGHER),
        (NOISY, NOISY[::-1], "PASS", None),
    ],
)
def test_losses(fp8, bf16, verdict, code):
    """One seed says nothing of a gap; four do."""
    curves = [{seed: Curve(seed, told, [0.0] * len(told)) for seed, told in enumerate(arm)} for arm in (fp8, bf16)]
    decision = check_losses(LossEvidence(*curves))
    assert (decision.verdict.value, decision.code) == (verdict, code)


# -- runs that end badly ----------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_held_run_that_is_killed_or_stopped_leaves_nothing(pool, how):
    """A process of its own; SIGSTOP is a hang."""
    arms = PairArms(Run.case, pool, runs().to_text(), how.name)
    arms.fp8.request("presence")
    process = pool.live(arms.fp8)
    pids = [process.pid, *process.pids]
    os.kill(process.pid, how)
    with pytest.raises(ArmError) as error:
        arms.fp8.request("losses", timeout=2, steps=500)
    assert error.value.code == (R.ARM_HUNG if how is signal.SIGSTOP else R.ARM_DIED)
    process.close()
    assert all_end(*pids)


def test_a_run_that_is_never_held_is_stopped(pool, forked, monkeypatch):
    arms = PairArms(Run.case, pool, forked(runs("--then hang --at 0")).to_text(), "never")
    monkeypatch.setattr("pytest_fp8.arms.pool.BUILD_SECONDS", 1)
    with pytest.raises(ArmError) as error:
        pool.live(arms.fp8)
    assert (error.value.code, "it makes no step" in error.value.message) == (R.ARM_HUNG, True)


def test_a_mark_with_another_number_of_ranks(pool, forked):
    script = replace(forked(runs()), env={"WORLD_SIZE": "2"})
    with pytest.raises(ArmError, match="trains on 2 ranks, and its mark says 1"):
        pool.live(PairArms(Run.case, pool, script.to_text(), "ranks").fp8)


# -- the mark ---------------------------------------------------------------------------------------------------------


def test_words_come_where_the_command_has_their_place():
    script = Script(
        ("accelerate", "launch", "{}", "train.py"), ("--mixed_precision", "bf16"), ("--fp8",), seed=("-s={}",)
    )
    case = Case(OWN, SCRIPT, "none", emulated=True, questions=QUESTIONS)
    assert script.of(case) == ["accelerate", "launch", "--fp8", "train.py"]
    assert replace(script, number=3).of(case.reference()) == [
        *("accelerate", "launch", "--mixed_precision", "bf16", "train.py", "-s=3"),
    ]
    assert Script.from_text(script.to_text()).of(case) == script.of(case)


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("train.py", {}, "command is no list of words"),
        ([], {}, "the command has no words"),
        (["train.py"], {"fp8": "--fp8"}, "fp8 is no list of words"),
        (["train.py"], {"seeds": 2, "sed": ["-s"]}, "no argument 'sed'"),
        (["train.py"], {"number": 3}, "no argument 'number'"),
        (["train.py"], {"gpus": "2"}, "gpus of a case"),
        (["train.py"], {"share": "0.7"}, "share is a part of 1"),
        (["train.py"], {"share": 70}, "share is a part of 1"),
        (["train.py"], {"env": "A=1"}, "dictionary update sequence"),
        (["train.py"], {"floor": 0}, "floor of a case"),
    ],
)
def test_a_mark_that_is_wrong_says_so(command, words, said):
    with pytest.raises(SettingsError, match=said):
        read("test_script", pytest.mark.fp8_script(command, **words).mark)


def test_a_test_for_each_question(pytester, python_with_torch):
    pytester.makepyfile(
        f"import pytest\n\n"
        f"@pytest.mark.fp8_script({[*python_with_torch.command, TRAIN]!r}, fp8=['--fp8'], emulated=True, share=0.9)\n"
        "def test_script(fp8_script):\n    fp8_script()\n"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-v", "--fp8-report=report")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_script?own.train-script-emulated-layers? PASSED*", "*-loss? PASSED*"])
    (entry,) = json.loads((pytester.path / "report" / "report.json").read_text())["entries"].values()
    assert entry["decisions"]["layers"]["numbers"]["fp8_share"] == pytest.approx(32 / 35)


# -- launchers, ranks, base -------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 2),
        (["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"], 1),
    ],
    ids=["torchrun", "accelerate"],
)
def test_ranks_of_a_launcher_hold_at_the_same_step(runner, pool, command, gpus):
    script = Script((sys.executable, *command, TRAIN), (), ("--fp8",))
    case = replace(Run.case, gpus=gpus, parallel="own" if gpus > 1 else "")
    pair = runner.script_pair(case, script, {})
    assert pair.layers().verdict is Verdict.PASS
    assert len(pair.fp8.request("ledger")["batch"]) == 4 * gpus
    assert pair.loss().verdict is Verdict.PASS
    assert len(pool.live(pair.fp8).pids) == gpus


@pytest.mark.nightly
@pytest.mark.parametrize(("slower", "verdict"), [(0.1, "FAIL"), (0.0, "PASS")])
def test_a_script_is_timed_beside_that_of_base(tmp_path, monkeypatch, python_with_torch, slower, verdict):
    """The same command, in a checkout of base and here. A host of two cores tells a tenth of a second."""
    from contextlib import ExitStack

    from pytest_fp8.compare import compare, environments

    path = tmp_path / "train.py"
    backward = "        loss.backward()\n"
    sleeps = Path(TRAIN).read_text().replace(backward, f"{backward}        time.sleep(0.05)\n")
    path.write_text(sleeps)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    slow = sleeps.replace("time.sleep(0.05)", f"time.sleep({0.05 + slower})")
    assert (slow == sleeps) is (slower == 0)
    path.write_text(slow)
    subprocess.run([*git, "commit", "-qam", "head", "--allow-empty"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    script = Script((*python_with_torch.command, "train.py"), (), ("--fp8",))
    case = Case(OWN, SCRIPT, "none", questions=QUESTIONS, name="train", tolerance=0.2)
    monkeypatch.setattr("pytest_fp8.compare.TOLERANCE", 0.2)
    pool = ArmPool(None)
    with ExitStack() as held:
        sides = environments("HEAD~1", tmp_path, held)
        found = compare(pool, case, (script.to_text(), script.identity), sides)
        pool.close()
    assert found.decision.verdict.value == verdict, found.decision.message
    assert found.step_ms["head"] - found.step_ms["base"] == pytest.approx(1e3 * slower, abs=30)


@pytest.mark.parametrize(("exit_code", "code"), [(0, W.TOO_SHORT), (1, R.ARM_DIED), (None, R.ARM_DIED)])
def test_a_script_that_crashes_in_its_first_steps_is_not_told_as_too_short(tmp_path, exit_code, code):
    (tmp_path / "log").write_text("")
    told = SimpleNamespace(
        _failed=lambda: [{"code": W.TOO_SHORT, "reason": "it ended after 3 steps"}],
        _error=lambda code, *words: code,
        process=SimpleNamespace(wait=lambda seconds: 1),
        log=tmp_path / "log",
        ranks=[],
        command=["python", "train.py"],
    )
    assert ScriptProcess._ended(told, exit_code, "before it was held") is code
