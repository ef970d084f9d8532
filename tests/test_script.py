"""A gate on a user's own script: two runs of it as it is, held at their steps, and what is said of them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.watching import OWN_FP8, PythonWithTorch
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import C, D, L, R, W
from pytest_fp8.errors import ArmError
from pytest_fp8.plan import FP8, REFERENCE, Ask
from pytest_fp8.questions.ledger.compare import find_in_ledger
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.recipes import SCRIPT
from pytest_fp8.script.command import QUESTIONS, Script
from pytest_fp8.script.judge import check_losses, check_presence, in_common
from pytest_fp8.verdicts import Verdict

pytestmark = pytest.mark.slow

TRAIN = """
import argparse, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--fp8", action="store_true")
parser.add_argument("--steps", type=int, default=4000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--passes", type=int, default=1)
parser.add_argument("--do", default="")
given = parser.parse_args()
torch.manual_seed(given.seed)
rows = torch.Generator().manual_seed(given.seed)
model = Model(Float8Linear if given.fp8 else nn.Linear).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
exec(given.do)
for step in range(given.steps):
    for _ in range(given.passes):
        ids = torch.randint(0, 48, (given.batch, 24), generator=rows)
        loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
        loss.backward()
    time.sleep(given.sleep)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(OWN_FP8 + TRAIN)
    return str(path)


@pytest.fixture(scope="module")
def pool():
    pool = ArmPool(None)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    process = PythonWithTorch(tmp_path_factory.mktemp("python"))
    yield process.command
    process.close()


@pytest.fixture(scope="module")
def held(train, pool, python):
    """The two runs with these further words."""

    def start(fp8=(), bf16=(), both=(), python=python):
        script = Script((*python, train, *both), tuple(bf16), ("--fp8", *fp8))
        case = Case(OWN, SCRIPT, "none", emulated=True, questions=QUESTIONS, name="train")
        return PairArms(case, pool, script.to_text(), script.identity)

    return start


@pytest.fixture(scope="module")
def sound(held):
    return held()


def presences(arms):
    def ask():
        return (yield Ask(REFERENCE, "presence"), Ask(FP8, "presence"))

    return arms.run(ask)


def ledgers(arms):
    from pytest_fp8.questions.asks import ledgers_of

    return in_common(arms.run(lambda: ledgers_of(SCRIPT)))


def curves(arms, steps=12):
    def ask():
        return (yield Ask(REFERENCE, "losses", steps=steps), Ask(FP8, "losses", steps=steps))

    one, two = ({0: Curve(0, losses, [0.0] * len(losses))} for losses in arms.run(ask))
    return LossEvidence(two, one)


# -- two sound runs ---------------------------------------------------------------------------------------------------


def test_fp8_is_on_in_one_run_and_the_work_is_the_same(sound):
    decision = check_presence(*presences(sound), ledgers(sound), least=0.9)
    assert (decision.verdict, decision.numbers["fp8_share"]) == (Verdict.PASS, pytest.approx(32 / 35))
    assert (decision.numbers["converted"], decision.numbers["linears"]) == (4, 5)
    assert "6 weights before the first step, AdamW, switches, the model's first inputs" in decision.headline


def test_losses_are_finite_and_not_bit_equal(sound):
    assert check_losses(curves(sound)).verdict is Verdict.PASS


def test_both_are_timed_in_turns(sound):
    """A host of two cores scatters: what is shown is that blocks alternate, and that the arms stand still between."""
    timer = BlockTimer(sound)
    sound.run(lambda: timer.measure(1, 2))
    assert [len(times) for times in (*timer.reference, *timer.other)] == [4, 4]
    assert all(0.1 < time < 1000 for times in (*timer.reference, *timer.other) for time in times)

    def asks():
        return (yield Ask(FP8, "losses", fresh=True, steps=5))

    before = sound.run(asks)
    time.sleep(0.5)
    assert sound.run(asks) == before


def test_a_run_is_as_it_would_be_alone(sound, train):
    """The weights and batches of the script: its losses are those of a run that nobody holds."""
    alone = OWN_FP8 + TRAIN.replace("    optimizer.step()\n", "    print(loss.item())\n    optimizer.step()\n")
    path = Path(train).with_name("alone.py")
    path.write_text(alone)
    done = subprocess.run([sys.executable, path, "--steps", "13"], capture_output=True, text=True, check=True)
    assert curves(sound).bf16[0].losses == [float(line) for line in done.stdout.split()][1:13]


# -- runs that do other work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fp8", "code"),
    [
        (["--batch", "2"], D.OTHER_WORK),
        (["--seed", "1"], D.OTHER_MODEL),
        (["--lr", "0.01"], D.OTHER_OPTIMIZER),
        (["--do", "torch.backends.cuda.matmul.allow_tf32 = True"], D.OTHER_SWITCH),
        (["--do", "rows.manual_seed(5)"], D.OTHER_DATA),
        (["--passes", "2"], D.OTHER_PASSES),
        (["--do", "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)"], D.OTHER_OPTIMIZER),
        (["--do", "model.blocks[0].up.weight = nn.Parameter(model.blocks[0].up.weight.clone())"], L.NOT_IN_OPTIMIZER),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_that_does_other_work_is_named(held, fp8, code):
    found = ledgers(held(fp8=fp8))
    codes = [finding.code for question in ("layers", "loss") if (finding := find_in_ledger(found, question))]
    assert code in codes


def test_fp8_that_is_off_fails_and_a_reference_in_fp8_is_no_answer(held):
    off = held(fp8=["--do", "Float8Linear.on = False"])
    decision = check_presence(*presences(off))
    assert (decision.verdict, decision.code) == (Verdict.FAIL, W.FP8_OFF)
    bf16, fp8 = presences(held(bf16=["--fp8"]))
    assert check_presence(bf16, fp8).code == R.BUILT_IN_FP8


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
        (OFF, RAN, {"least": 0.9}, "FAIL", W.BELOW_SHARE),
        (OFF, RAN, {"stored_share": [0.9]}, "FAIL", L.LESS_THAN_BASELINE),
        (OFF, RAN, {"stored_counts": {"fp8_wgrad": 3}}, "FAIL", L.LESS_THAN_BASELINE),
        (OFF, RAN, {"stored_share": [0.8], "stored_counts": {"fp8_wgrad": 2}}, "PASS", None),
    ],
)
def test_presence(bf16, fp8, more, verdict, code):
    decision = check_presence(bf16, fp8, **more)
    assert (decision.verdict.value, decision.code) == (verdict, code)


FALLING = [3.0 - 0.02 * step for step in range(40)]
NOISY = [[loss + 0.001 * math.sin(9 * step + seed) for step, loss in enumerate(FALLING)] for seed in range(4)]


def losses(fp8, bf16):
    arms = ({seed: Curve(seed, told, [0.0] * len(told)) for seed, told in enumerate(arm)} for arm in (fp8, bf16))
    return LossEvidence(*arms)


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
    decision = check_losses(losses(fp8, bf16))
    assert (decision.verdict.value, decision.code) == (verdict, code)


# -- runs that end badly ----------------------------------------------------------------------------------------------


def left_behind(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in _state(pid)]


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--steps", "3"], W.TOO_SHORT, "3 steps of"),
        (["--steps", "12"], W.TOO_SHORT, "ended while it was asked"),
        (["--do", "raise ValueError('no data')"], R.ARM_DIED, "no data"),
        (["--do", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], R.ARM_DIED, "SIGSEGV"),
        (["--do", "raise torch.OutOfMemoryError('CUDA out of memory')"], R.OUT_OF_MEMORY, "ran out of GPU memory"),
        (["--do", "sys.exit()"], W.NO_TRAINING, "before it was held"),
        (["--do", "open(__file__ + '.no')"], R.ARM_DIED, "FileNotFoundError"),
    ],
)
def test_a_run_that_ends_is_one_clear_error_and_nothing_is_left(held, pool, words, code, said):
    arms = held(fp8=words)
    with pytest.raises(ArmError) as error:
        curves(arms, steps=40)
    assert (error.value.code, said in error.value.message) == (code, True), error.value.message


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "hang"])
def test_a_held_run_that_is_killed_or_hangs(held, pool, how):
    arms = held(both=["--do", f"'{how}'"], python=[sys.executable])
    presences(arms)
    process = pool.live(arms.fp8)
    pids = [process.pid, *process.pids]
    if how == "hang":
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ArmError) as error:
            arms.fp8.request("losses", timeout=2, steps=500)
        assert error.value.code == R.ARM_HUNG
    else:
        os.kill(process.pid, how)
        with pytest.raises(ArmError) as error:
            process.request("losses", steps=500)
        assert (error.value.code, how.name in error.value.headline) == (R.ARM_DIED, True)
    process.close()
    assert left_behind(pids) == []


def test_a_command_that_does_not_start(pool):
    script = Script(("no-such-command", "train.py"))
    case = Case(OWN, SCRIPT, "none", emulated=True, questions=QUESTIONS, name="none")
    with pytest.raises(ArmError, match="FP8-R08"):
        PairArms(case, pool, script.to_text(), "none").start()


# -- the mark ---------------------------------------------------------------------------------------------------------


def test_words_come_where_the_command_has_their_place():
    script = Script(
        ("accelerate", "launch", "{}", "train.py"), ("--mixed_precision", "bf16"), ("--fp8",), seed=("-s={}",)
    )
    case = Case(OWN, SCRIPT, "none", emulated=True, questions=QUESTIONS)
    assert script.of(case) == ["accelerate", "launch", "--fp8", "train.py"]
    assert script.seeded(3).of(case.reference()) == [
        *("accelerate", "launch", "--mixed_precision", "bf16", "train.py", "-s=3"),
    ]
    assert Script.from_text(script.to_text()).of(case) == script.of(case)


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("'train.py'", "command is no list of words"),
        ("[]", "command is no list of words"),
        ("['train.py'], fp8='--fp8'", "fp8 is no list of words"),
        ("['train.py'], seeds=2, sed=['-s']", "no argument 'sed'"),
        ("['train.py'], share=70", "share is a part of 1"),
        ("['train.py'], floor=0", "floor of a case"),
    ],
)
def test_a_mark_that_is_wrong_says_so(pytester, mark, said):
    pytester.makepyfile(
        f"import pytest\n\n@pytest.mark.fp8_script({mark})\ndef test_script(fp8_script):\n    fp8_script()\n"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines([f"*{said}*"])
    assert result.ret != 0


def test_a_test_for_each_question(pytester, train):
    pytester.makepyfile(
        f"import sys, pytest\n\n"
        f"@pytest.mark.fp8_script([sys.executable, {train!r}], fp8=['--fp8'], emulated=True, share=0.9)\n"
        "def test_script(fp8_script):\n    fp8_script()\n"
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-v", "--fp8-report=report")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_script?own.train-script-emulated-layers? PASSED*", "*-loss? PASSED*"])
    (entry,) = json.loads((pytester.path / "report" / "report.json").read_text())["entries"].values()
    assert entry["decisions"]["layers"]["numbers"]["fp8_share"] == pytest.approx(32 / 35)


# -- launchers, ranks, base -------------------------------------------------------------------------------------------

RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
rows.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
"""


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize(
    ("command", "gpus", "do"),
    [
        (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 2, RANKS),
        (["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"], 1, ""),
    ],
    ids=["torchrun", "accelerate"],
)
def test_ranks_of_a_launcher_hold_at_the_same_step(pool, train, command, gpus, do):
    script = Script((sys.executable, *command, train, "--do", do), (), ("--fp8",))
    ranks = {"gpus": gpus, "parallel": "own"} if gpus > 1 else {}
    case = Case(OWN, SCRIPT, "none", emulated=True, questions=QUESTIONS, name="ranks", **ranks)
    arms = PairArms(case, pool, script.to_text(), script.identity)
    assert check_presence(*presences(arms), ledgers(arms)).verdict is Verdict.PASS
    assert len(ledgers(arms).fp8.batch) == 4 * gpus
    assert check_losses(curves(arms)).verdict is Verdict.PASS
    assert len(pool.live(arms.fp8).pids) == gpus


def test_a_mark_with_another_number_of_ranks(pool, train):
    command = sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    script = Script((*command, train, "--do", RANKS))
    case = Case(OWN, SCRIPT, "none", emulated=True, questions=QUESTIONS, name="one")
    with pytest.raises(ArmError, match="trains on 2 ranks, and its mark says 1"):
        pool.live(PairArms(case, pool, script.to_text(), script.identity).fp8)


@pytest.mark.nightly
@pytest.mark.parametrize(("slower", "verdict"), [(0.1, "FAIL"), (0.0, "PASS")])
def test_a_script_is_timed_beside_that_of_base(tmp_path, monkeypatch, python, slower, verdict):
    """The same command, in a checkout of base and here. A host of two cores tells a tenth of a second."""
    from contextlib import ExitStack

    from pytest_fp8.compare.session import Model, Side, compare, environments

    path = tmp_path / "train.py"
    sleeps = OWN_FP8 + TRAIN.replace("time.sleep(given.sleep)", "time.sleep(0.05)")
    path.write_text(sleeps)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    path.write_text(sleeps.replace("time.sleep(0.05)", f"time.sleep({0.05 + slower})"))
    subprocess.run([*git, "commit", "-qam", "head", "--allow-empty"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    script = Script((*python, "train.py"), (), ("--fp8",))
    case = Case(OWN, SCRIPT, "none", questions=QUESTIONS, name="train")
    pool = ArmPool(None)
    with ExitStack() as held:
        sides = environments(Side("", "HEAD~1"), Side(), tmp_path, held)
        found = compare(pool, case, Model(script.to_text(), script.identity), sides, tolerance=0.2)
        pool.close()
    assert found.decision.verdict.value == verdict, found.decision.message
    assert found.step_ms["head fp8"] - found.step_ms["base fp8"] == pytest.approx(1e3 * slower, abs=30)
