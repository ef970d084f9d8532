"""Every code of baselines, checkpoints and speed, and each kind of error of a person's settings: what leads to it, and
all that is said then."""

from __future__ import annotations

import math
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.baselines import GOOD, baseline, edit, read
from helpers.evidence import trained, transfer
from helpers.steps import (
    BF16,
    FP8_ARM,
    asked,
    changed,
    gpu_step,
    on_half_the_rows,
    profiled,
    recorded_step,
    sessions,
    sleeping,
    travelling,
)
from pytest_fp8 import Case, Workload, gpu
from pytest_fp8.baselines.check import inspect, suite_cases
from pytest_fp8.baselines.store import Folder, chosen, read_folder, write_baseline
from pytest_fp8.codes import B, K, R, S
from pytest_fp8.compare import judge
from pytest_fp8.errors import Fp8Error
from pytest_fp8.gpu import Conditions
from pytest_fp8.markers import cases_of
from pytest_fp8.options import Settings
from pytest_fp8.questions.checkpoints.check import check_checkpoints
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.timing import Beside, Turn
from pytest_fp8.report.rows import Answer
from pytest_fp8.report.terminal import unanswered
from pytest_fp8.said import said
from pytest_fp8.stats.looks import against_base

ROOT = Path(__file__).parents[2]

# -- files and commands of baselines, settings: errors ----------------------------------------------------------------

FILE = "h200/1b-torchao-rowwise.json"


def written(change):
    """Reads the sound baseline after ``change`` of its path."""

    def ask(folder):
        write_baseline(folder, GOOD)
        change(folder / FILE)
        read(folder)

    return ask


def onto_a_file(folder):
    (folder / "h200").write_text("")
    write_baseline(folder, GOOD)


def of_no_revision(folder):
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    Folder(folder, "nowhere").all()


def case(**fields):
    return lambda _: Case(**{"model": "tiny", "backend": "torchao", "recipe": "tensorwise", **fields})


def mark(**fields):
    return lambda _: cases_of("test_x.py::test", [(None, pytest.mark.fp8(**fields).mark)], Settings())


def workload(ship=False, **fields):
    def make(_):
        made = Workload(**{"build": lambda: None, "batch": lambda step: None, **fields})
        return made.ship("test_x.py::test") if ship else made

    return make


RAISED = {
    B.UNREADABLE: written(lambda path: path.write_text("{")),
    B.REDEFINED: written(lambda path: edit(path, lambda data: data.update(case_hash="b"))),
    B.NOT_WRITTEN: onto_a_file,
    B.NOTHING_THERE: lambda folder: read_folder(folder / "basline"),
    B.UNKNOWN_NAME: lambda folder: chosen({Path(FILE): GOOD}, case="1b-torchao-rowwse"),
    B.NO_REVISION: of_no_revision,
    B.NO_SUITE: lambda folder: suite_cases(folder / "matrix.py"),
    R.UNKNOWN_GPU: lambda _: gpu.known("x100"),
    R.UNKNOWN_NAME: case(options={"margin": 1}),
    R.BAD_VALUE: case(checkpoint_formats=("pickle",)),
    R.BAD_MARK: mark(cases=[], recipe="tensorwise"),
    R.NO_CASE: mark(emulated=True, question="memory"),
    R.NOT_EMULATED: case(backend="te", recipe="delayed", emulated=True),
    R.FIELDS_DISAGREE: case(backend="unsloth", recipe="rowwise", lora=8, autocast=True),
    R.ADAPTERS_ALONE: case(backend="unsloth", recipe="rowwise"),
    R.NOT_A_FUNCTION: workload(batch=lambda: None),
    R.SAVE_WITHOUT_LOAD: workload(ship=True, save=lambda model, optimizer, folder: None),
}
"""Code -> what raises it, given a folder."""

# -- the checkpoints question, from evidence written by hand ----------------------------------------------------------

KEPT = {
    "schedule": {"last_epoch": 4},
    "groups": {"group 0: lr": 3e-4},
    "attributes": {"ema[0]": "tensor 8x8 0001"},
}


def own(saved=None, loaded=None, **kept):
    """A checkpoint through the user's own functions. ``kept``: what the target has after loading."""
    after = {**KEPT, **kept}
    return transfer(
        store="own",
        saved_changes={"kept": KEPT, **(saved or {})},
        loaded_changes={"kept": after, **(loaded or {})},
        source=trained([2.0, 1.9], **KEPT),
        resumed=trained([2.0, 1.9], **after),
    )


def stores(**changes):
    return transfer(loaded_changes=changes)


LEFT_IN_EVAL = replace(own(), logit_distance=0.4)
CARRIED = {
    K.STORED_IN_FP8: transfer(saved_changes={"on_disk": {"F8_E4M3": 2}}),
    K.UNTIED: stores(untied={"head": "emb"}),
    K.WEIGHTS_MISSING: own(loaded={"digests": {"w": 8, "v": 2}, "untouched": ["w"]}),
    K.WEIGHTS_CHANGED: stores(digests={"w": 1, "v": 3}),
    K.CHANGED_BY_SAVING: own(saved={"changed_by_saving": ["w"]}),
    K.STRAY_PARAMETERS: own(loaded={"strays": True}),
    K.STALE_COPIES: stores(stale=["q"]),
    K.OPTIMIZER_LOST: stores(optimizer_digests={}),
    K.STATE_LOST: own(schedule={"last_epoch": 0}),
    K.SOURCE_NOT_FINITE: transfer(logit_distance=math.nan),
    K.DATA_NOT_CARRIED: transfer(resumed=trained([2.0, 1.9], data=2)),
    K.COMPUTES_OTHERWISE: transfer(logit_distance=1.4),
    K.STATE_LEFT_BEHIND: [
        replace(LEFT_IN_EVAL, saved=replace(LEFT_IN_EVAL.saved, flags=["model.training = False"])),
        replace(LEFT_IN_EVAL, arms=("bf16", "fp8")),
    ],
    K.DOES_NOT_GO_ON: transfer(source=trained([2.0, 1.9]), resumed=trained([3.0, 2.9])),
    K.LOAD_REFUSED: stores(refused="the model's load_state_dict(): RuntimeError: no"),
}

# -- the speed question and the comparison in one session, from evidence written by hand ------------------------------

PLAIN = TimingEvidence([[100.0, 100.1] * 6] * 2, [[80.0, 80.1] * 6] * 2)
LAUNCHES = profiled(recorded_step("1b-transformer_engine-current"), 210.0, 120.0)
FLASH = {"efficient": ["fmha_cutlassF"]}, {"cudnn": ["cudnn_flash"]}


def plain(floor=None, bf16_ms=(), **changes):
    history = changes.pop("history", ())
    evidence = replace(PLAIN, **changes)
    return check_speedup(evidence, floor=floor, tolerance=0.02, history=history, baseline_reference_ms=bf16_ms)


def scattering():
    blocks = [114.0, 108.0, 101.0, 165.0, 186.0, 99.0, 97.0, 98.0, 157.0, 99.0, 101.0, 98.6]
    fp8 = profiled(recorded_step("1b-transformer_engine-delayed"), 97.0, 95.6)
    return check_speedup(
        TimingEvidence([[121.5] * 12] * 2, [blocks] * 2, bf16_step=BF16, fp8_step=fp8), floor=1.0, tolerance=0.02
    )


TIMED = {
    S.NO_BASELINE: plain,
    S.FASTER_THAN_BASELINE: lambda: plain(history=sessions(1.18)),
    S.SLOWER_THAN_BASELINE: lambda: plain(history=sessions(1.35)),
    S.LAUNCH_BOUND: lambda: asked(fp8=LAUNCHES, fp8_ms=206.0),
    S.SHORT_OF_MEMORY: lambda: sleeping(beside=Beside(turns=[Turn("BF16", steps=6, retries=12)])),
    S.NOT_COMPILED: lambda: plain(fp8=[[120.0, 120.1] * 6] * 2, fp8_compiled=False, floor=1.0),
    S.SLOW_WIRE: lambda: asked(travelling(BF16, 12.0, 8.0, 2.0), travelling(FP8_ARM, 32.0, 8.0, 22.0), 123.5, 128.0),
    S.COSTS_MORE_THAN_IT_SAVES: lambda: asked(floor=1.25),
    S.HOST_SCATTERS: scattering,
    S.SESSIONS_DIFFER: lambda: plain(history=sessions(1.27)),
    S.UNDECIDED: lambda: plain(fp8=[[99.0, 101.0] * 6, [101.0, 99.0] * 6], floor=1.0),
    S.OTHER_PROCESS: lambda: plain(beside=Beside([Conditions(strangers=(7,))])),
    S.THROTTLED: lambda: plain(beside=Beside([Conditions(1980)] * 9 + [Conditions(1200, ("hardware thermal",))] * 3)),
    S.OTHER_ATTENTION: lambda: plain(
        bf16_step=gpu_step({}, attention=FLASH[0]), fp8_step=gpu_step({}, attention=FLASH[1])
    ),
    S.OTHER_REFERENCE: lambda: plain(history=sessions(1.25), bf16_ms=[[88.0]]),
    S.NO_BUSY_TIMES: lambda: asked(fp8=LAUNCHES, fp8_ms=206.0, floor=None, history=sessions(0.8)),
    S.COMPILED_WHILE_TIMED: lambda: plain(beside=Beside(turns=[Turn("FP8", compilations=2)])),
    S.LESS_WORK: lambda: asked(fp8=on_half_the_rows(FP8_ARM, 8192), fp8_ms=60.0),
    S.REFERENCE_WAITS: sleeping,
    S.TOO_GOOD: lambda: asked(fp8=changed(FP8_ARM, rest=1.0), fp8_ms=80.0),
    S.SLOWER_THAN_BASE: lambda: judge(against_base([[-0.05] * 10] * 6, 0.01), 0.01, True),
}


def found(code, folder):
    """The error or the decision of this code."""
    if code in RAISED:
        with pytest.raises(Fp8Error) as error:
            RAISED[code](folder)
        return error.value
    if code in TIMED:
        return TIMED[code]()
    evidence = CARRIED[code]
    return check_checkpoints(evidence if isinstance(evidence, list) else [evidence])


@pytest.mark.parametrize("code", [*RAISED, *CARRIED, *TIMED], ids=lambda code: f"{type(code).__name__}-{code.slug}")
def test_words(code, snapshot, tmp_path):
    said = found(code, tmp_path)
    assert said.code is code, said.message
    text = re.sub(r" at 0x\w+", "", said.message)
    assert text.replace(str(tmp_path), "FOLDER").replace(os.getcwd(), "HERE") == snapshot


def test_every_code_has_its_words_here(snapshot):
    """Those of ``baselines check`` are notes on a folder that has one of each."""
    one, other = Case("1b", "torchao", "rowwise"), Case("1b", "torchao", "tensorwise")
    coarse = baseline(one.id, one.digest(), metrics={"speedup": [[0.0] * 6, [0.2] * 6], "fp8_share": [0.5]})
    stored = {
        one.id: replace(coarse, sessions=(replace(coarse.newest, measurement=1),)),
        "1b-nobody": baseline("1b-nobody", "h"),
    }
    notes = inspect({Path("h200", f"{name}.json"): each for name, each in stored.items()}, [one, other])
    assert {note.code for note in notes} | {code for code in RAISED if code in set(B)} == set(B)
    assert (set(CARRIED), set(TIMED)) == (set(K), set(S))
    assert "\n".join(f"{note.code} {note.error}: {note.message}" for note in notes) == snapshot


def test_each_sentence_is_raised_by_its_name():
    code = "".join(path.read_text() for path in (ROOT / "pytest_fp8").rglob("*.py"))
    raised = set(re.findall(r'WorkloadError\(\s*"(\w+)"', code))
    assert raised | {"rows"} == set(said()["workload"])
    assert set(re.findall(r"class (\w+)\(Told, ", code)) == set(said()["error"])
    assert all(R[entry["code"]] for table in ("workload", "error") for entry in said()[table].values())


def test_what_a_session_says_at_its_end(snapshot):
    answers = [Answer("", "a", "", "loss", "INVALID", "FP8-D01", "the arms trained on different data")]
    answers += [Answer("", "b", "", "speedup", "NOT_EXERCISED", S.NO_BASELINE, "no baseline")]
    problems, _ = unanswered(answers, gpu="h200", in_ci=True)
    assert problems == snapshot
