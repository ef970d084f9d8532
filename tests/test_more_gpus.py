"""The prediction of a step on more GPUs: what it is made of, and that it gives a measured case back."""

from __future__ import annotations

import json

import pytest

from benchmarks.more_gpus import Work, main, predict, work_of
from pytest_fp8.zoo.shapes import SHAPES

CASE = "8b16-te-current-fsdp2.2-4x4096"
CLASSES = {
    "other products": 302.4,
    "attention": 39.2,
    "optimizer": 13.2,
    "rest": 49.4,
    "communication": 70.2,
    "fp8 products": 0.0,
}
BF16 = {"step": 408.1, "classes": CLASSES, "wire": {"exposed": 8.5, "rows": [{"milliseconds": 50.2}]}}
ACCOUNT = {"bf16": BF16, "fp8": {"wire": {"exposed": 10.7, "rows": []}}, "earned_ms": 120.0, "casts_ms": 39.0}
"""Seen on two H200s, rounded: 16 of 8B's layers, Transformer Engine's current scaling."""


@pytest.fixture
def report(tmp_path):
    def written(account=ACCOUNT, case=CASE):
        path = tmp_path / "report.json"
        entry = {"decisions": {"faster": {"numbers": {"account": account}}}}
        path.write_text(json.dumps({"schema": 1, "entries": {case: entry}}))
        return str(path)

    return written


def test_a_measured_case_is_given_back():
    same = predict(ACCOUNT, work_of(CASE), work_of(CASE))
    assert same.bf16 == pytest.approx(408.1)
    assert same.fp8 == pytest.approx(408.1 - 120 + 39 + 10.7 - 8.5)
    assert same.wire == 50.2


def test_the_bytes_are_those_that_fsdp2_was_seen_to_move():
    work = work_of(CASE)
    assert (work.gpus, work.batch, work.seq) == (2, 2, 4096)
    assert work.gathered == pytest.approx(16_060_522_496, rel=1e-4)
    assert work.reduced == pytest.approx(9_080_938_496, rel=1e-4)
    assert Work(SHAPES["8b"], 1, 1, 8192).wire == 0


def test_more_gpus_share_the_optimizer_and_wait_for_more_bytes():
    measured, eight = work_of(CASE), Work(SHAPES["8b16"], 8, 2, 4096)
    found = predict(ACCOUNT, measured, eight)
    assert found.wire == pytest.approx(50.2 * (7 / 8) / (1 / 2))
    now, busy = 302.4 + 39.2 + 13.2 + 49.4 + 8.5, 302.4 + 39.2 + 13.2 / 4 + 49.4 + 8.5 * 1.75
    assert found.bf16 == pytest.approx(408.1 * busy / now)


def test_twice_the_length_is_twice_the_attention_and_nothing_else():
    measured, longer = work_of(CASE), Work(SHAPES["8b16"], 2, 1, 8192)
    assert longer.attention == 2 * measured.attention
    assert (longer.products, longer.others, longer.wire) == (measured.products, measured.others, measured.wire)


def test_a_row_for_each_number_of_gpus_after_the_measured_case(report, capsys):
    assert main([report(), CASE, "--model", "8b", "--seq", "8192"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["2", "1", "2", "4", "8"]
    assert main([report(), CASE, "--gpus", "4", "--markdown"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("asked", "says"),
    [("8b-te-current", "names no case of FSDP2"), ("8b16-te-delayed-fsdp2.2-4x4096", f"but {CASE}")],
)
def test_a_case_that_cannot_be_scaled_is_one_clear_error(report, capsys, asked, says):
    with pytest.raises(SystemExit) as ended:
        main([report(), asked])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_an_account_without_a_wire_is_the_same_error(report, capsys):
    with pytest.raises(SystemExit):
        main([report({**ACCOUNT, "bf16": {**BF16, "wire": {}}}), CASE])
    assert "KeyError" in capsys.readouterr().out
