"""The precision check on settings written by hand: each way in which one of them wins, named; and the healthy one."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

import resolve
from helpers.evidence import verdict_of
from pytest_fp8 import ArmError, Verdict
from pytest_fp8.codes import P
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.precision import Switches, check_precision

HEALTHY = [
    (Switches("fp8", used="fp8"), "ACCELERATE_MIXED_PRECISION"),
    (Switches("", "fp8", launched=True, process="fp8", used="fp8"), "config file"),
    (Switches(used="fp8"), "own Accelerator"),
]
BROKEN = [
    (Switches("fp8", arguments="bf16", used="bf16"), P.TRAINER_DECIDES, "bf16=True of the Trainer"),
    (Switches("", "fp8", "fp16", True, "fp8", "fp16"), P.TRAINER_DECIDES, "fp16=True of the Trainer"),
    (Switches("fp8", "bf16", "", True, "bf16", "bf16"), P.LAUNCHER_DECIDES, "the config file of accelerate launch"),
    (Switches("fp8", launched=True, process="no", used="no"), P.LAUNCHER_DECIDES, "launch without a file"),
    (Switches("fp8"), P.NOTHING_READS_IT, "no Accelerator was made"),
    # A caller that sees the environment alone does not know the Trainer's arguments.
    (Switches("fp8", used="bf16"), P.TRAINER_DECIDES, "bf16=True of the Trainer"),
    # Where they are known to be empty, the program's own argument won over file and environment.
    (Switches("fp8", "fp8", "", True, "fp8", "bf16"), P.PROGRAM_DECIDES, "own Accelerator(mixed_precision=...)"),
    (Switches("bf16", arguments="", used="bf16"), P.ENVIRONMENT_DECIDES, "ACCELERATE_MIXED_PRECISION"),
]


@pytest.mark.parametrize(("switches", "by"), HEALTHY)
def test_fp8_passes_and_says_who_asked_for_it(switches, by):
    decision = check_precision(switches)
    assert decision.verdict is Verdict.PASS
    assert by in decision.headline


@pytest.mark.parametrize(("switches", "code", "says"), BROKEN)
def test_what_took_fp8_away_is_named(switches, code, says):
    verdict_of(check_precision(switches), Verdict.FAIL, code, says)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("a: 1\nmixed_precision: fp8  # ours\n", "fp8"),
        ('{\n  "mixed_precision": "fp8",\n  "a": 1\n}', "fp8"),
        ("mixed_precision: no\n", "no"),
        ("x: 1\n", ""),
        ("", ""),
    ],
)
def test_a_config_files_precision_is_read_from_yaml_and_json(tmp_path, text, precision):
    file = tmp_path / "c"
    file.write_text(text)
    assert resolve.precision_in(file) == precision


@pytest.fixture
def program(monkeypatch):
    """Stands in for the process that is asked. It notes each command, and ends with ``status``."""
    made = SimpleNamespace(started=[], status=0)

    def run(command, environment):
        made.started.append(command)
        answers = "".join(
            resolve.MARK + json.dumps(to_plain(Switches(used="fp8"))) + "\n"
            for part in command
            if part.startswith("--ask")
        )
        return subprocess.CompletedProcess(command, made.status, answers, "its last words")

    monkeypatch.setattr(resolve, "run_program", run)
    resolve.answers.cache_clear()
    yield made
    resolve.answers.cache_clear()


def test_the_same_question_is_asked_once_and_another_again(program, monkeypatch, tmp_path):
    file = tmp_path / "fp8.yaml"
    file.write_text("mixed_precision: fp8")
    questions = [("fp8",), ("bf16",), ("", file)]
    for _ in range(2):
        for question in questions:
            resolve.resolve(*question)
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "another test")
    assert len(program.started) == len(questions)
    file.write_text("mixed_precision: bf16")
    resolve.resolve("", file)
    assert len(program.started) == len(questions) + 1, "the file's content has changed, its name has not"


def test_a_question_that_failed_is_asked_again(program):
    program.status = 1
    with pytest.raises(ArmError, match="its last words"):
        resolve.resolve("fp8")
    program.status = 0
    assert [s.used for s in resolve.resolve("fp8")] == ["fp8", "fp8"]
    assert len(program.started) == 2
