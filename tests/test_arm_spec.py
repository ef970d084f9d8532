"""What an arm is told crosses the pipe whole, and what cannot cross is an error that names the test."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest

from helpers.arms import make_batch, spec
from pytest_fp8 import Case, SettingsError, Workload
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import from_plain, to_plain


def test_the_spec_that_an_arm_reads_is_the_one_that_was_sent():
    sent = dataclasses.replace(spec(), case=Case("tiny", "torchao", "rowwise", lora=8, lora_targets=("q_proj",)))
    assert from_plain(ArmSpec, json.loads(json.dumps(to_plain(sent)))) == sent


@pytest.mark.parametrize("part", ["ArmSpec", "ArmSpec.case"])
def test_a_spec_with_a_key_too_few_or_too_many_is_an_error_that_names_it(part):
    for change in ({"new": 1}, None):
        data = json.loads(json.dumps(to_plain(spec())))
        record = data if part == "ArmSpec" else data["case"]
        gone = "control" if part == "ArmSpec" else "floor"
        if change is None:
            del record[gone]
        else:
            record.update(change)
        with pytest.raises(ValueError, match=rf"{part}.* '{'new' if change else gone}'"):
            from_plain(ArmSpec, data)


def test_a_function_that_cannot_travel_names_the_test_that_asked():
    lock = threading.Lock()

    def build():
        return lock

    with pytest.raises(SettingsError, match=r"cannot be sent to the arm's process \(asked by test_mine\)") as error:
        Workload(build=build, batch=make_batch).ship("test_mine")
    assert "lock" in str(error.value)
