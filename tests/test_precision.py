"""The precision check on settings written by hand: each way in which one of them wins, named; and the healthy one."""

from __future__ import annotations

import pytest

from pytest_fp8 import Verdict
from pytest_fp8.checks.precision import Switches, check_precision, winner
from pytest_fp8.resolve import _precision_of

HEALTHY = [
    (Switches("fp8", used="fp8"), "ACCELERATE_MIXED_PRECISION"),
    (Switches("", "fp8", launched=True, process="fp8", used="fp8"), "config file"),
    (Switches(used="fp8"), "own Accelerator"),
]
BROKEN = [
    (Switches("fp8", arguments="bf16", used="bf16"), "bf16=True of the Trainer wins over it"),
    (Switches("fp8", arguments="fp16", used="fp16"), "fp16=True of the Trainer wins over it"),
    (Switches("", "fp8", "bf16", True, "fp8", "bf16"), "the config file asks for fp8 and Accelerate trains in bf16"),
    (Switches("fp8", "bf16", "", True, "bf16", "bf16"), "the config file of accelerate launch wins over it"),
    (Switches("fp8", launched=True, process="no", used="no"), "accelerate launch without a file"),
    (Switches("fp8"), "nothing in this program reads it"),
    (Switches("fp8", used="bf16"), "bf16=True of the Trainer wins over it"),
]


@pytest.mark.parametrize(("switches", "by"), HEALTHY)
def test_fp8_passes_and_says_who_asked_for_it(switches, by):
    decision = check_precision(switches)
    assert decision.verdict is Verdict.PASS
    assert by in decision.headline
    assert by in winner(switches)


@pytest.mark.parametrize(("switches", "says"), BROKEN)
def test_what_took_fp8_away_is_named(switches, says):
    decision = check_precision(switches)
    assert decision.verdict is Verdict.FAIL
    assert says in decision.message
    for line in ("expected:", "seen:", "cause:", "next:"):
        assert line in decision.message


@pytest.mark.parametrize(
    "text", ["a: 1\nmixed_precision: fp8  # ours\n", '{\n  "mixed_precision": "fp8",\n}', "x: 1\n"]
)
def test_a_config_files_precision_is_read_from_yaml_and_json(tmp_path, text):
    file = tmp_path / "c"
    file.write_text(text)
    assert _precision_of(file) == ("fp8" if "fp8" in text else "")
