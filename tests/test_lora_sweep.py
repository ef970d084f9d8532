"""What a rank of adapters costs: made-up coefficients are found again, too few ranks name the next command."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.lora.__main__ import main
from benchmarks.lora.model import Point, fit, weight_of
from helpers.baselines import baseline, edit
from pytest_fp8 import Case
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.zoo.adapters import PROJECTIONS
from pytest_fp8.zoo.shapes import SHAPES

FULL = Case("1b", "torchao", "tensorwise")
BF16, FP8, ADAPTERS, SLOPE = 100.0, 75.0, 12.0, 0.25
"""Milliseconds; the slope per rank."""
ATTENTION = ("q_proj", "v_proj")


def point(rank, weight=1.0, noise=0.0, seed=0, processes=4):
    rng = np.random.default_rng([seed, rank, round(weight * 1000)])
    part = weight * (ADAPTERS + SLOPE * rank)
    bf16, fp8 = (
        tuple(float(x) for x in (base + part) * np.exp(rng.normal(0, noise, processes))) for base in (BF16, FP8)
    )
    return Point(rank, bf16, fp8, weight)


def sweep(weights=(1.0,), **noise):
    return [point(rank, weight, **noise) for weight in weights for rank in (8, 16, 32, 64)]


def store(folder, measured, case, **origin):
    metrics = {name: list(getattr(measured, name)) for name in ("bf16_ms", "fp8_ms")}
    write_baseline(folder, baseline(case.id, case.digest(), metrics=metrics, **origin))


# -- the fit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_known_coefficients_are_found_under_one_per_cent_of_noise(seed):
    found = fit(sweep(noise=0.01, seed=seed))
    assert found.adapters is None
    assert found.bf16_base == pytest.approx(BF16 + ADAPTERS, abs=4 * found.errors["bf16_base"])
    assert found.fp8_base == pytest.approx(FP8 + ADAPTERS, abs=4 * found.errors["fp8_base"])
    assert found.slope == pytest.approx(SLOPE, abs=4 * found.errors["slope"])
    assert found.errors["slope"] < SLOPE / 10
    assert found.speedup(32) == pytest.approx(120 / 95, rel=0.01)


def test_fewer_adapted_linears_tell_the_fixed_part_from_the_base():
    found = fit(sweep(weights=(1.0, 0.2), noise=0.01, seed=1))
    assert found.adapters == pytest.approx(ADAPTERS, abs=4 * found.errors["adapters"])
    assert found.bf16_base == pytest.approx(BF16, rel=0.02)
    assert found.fp8_base == pytest.approx(FP8, rel=0.02)
    assert found.share(32) == pytest.approx(20 / 95, rel=0.1)


def test_without_noise_everything_is_exact_and_the_arms_agree():
    found = fit(sweep(weights=(1.0, 0.5)))
    assert (found.bf16_base, found.fp8_base, found.adapters, found.slope) == pytest.approx((BF16, FP8, ADAPTERS, SLOPE))
    assert found.slopes == pytest.approx((SLOPE, SLOPE))
    assert found.adapter_ms(16, 0.5) == pytest.approx(8.0)


def test_adapters_that_were_converted_show_as_slopes_that_differ():
    points = [replace(p, fp8_ms=tuple(FP8 + 0.1 * p.rank for _ in p.fp8_ms)) for p in sweep()]
    assert fit(points).slopes == pytest.approx((SLOPE, 0.1))


def test_full_training_is_no_point_of_the_line():
    full = Point(0, (150.0,), (110.0,))
    assert fit([full, *sweep()]) == fit(sweep())


@pytest.mark.parametrize("ranks", [(), (8,), (8, 16), (0, 8, 16), (8, 8, 16)])
def test_too_few_ranks_are_refused(ranks):
    with pytest.raises(ValueError, match="needs 3"):
        fit([point(rank) for rank in ranks])


def test_the_weight_is_the_share_of_features():
    shape = SHAPES["1b"]
    assert weight_of(shape, ()) == weight_of(shape, PROJECTIONS) == 1
    # q: 2048 + 2048, v: 2048 + 512; all: 2 * 4096 + 2 * 2560 + 3 * 10240.
    assert weight_of(shape, ATTENTION) == pytest.approx(6656 / 44032)


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    for rank in (8, 16, 32):
        store(tmp_path, point(rank), replace(FULL, lora=rank))
    store(tmp_path, Point(0, (150.0,), (110.0,)), FULL)
    return tmp_path


def test_the_table_has_a_row_per_rank_and_says_that_its_part_is_a_bound(folder, capsys):
    assert main(["--dir", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "all weights are trained" in out
    assert ">= 8.00" in out
    assert "0.00%" in out
    assert "250.0 +- 0.0 us a rank" in out
    assert "adapters on fewer Linears" in out
    assert "note:" not in out


def test_other_targets_join_the_fit(folder, capsys):
    case = replace(FULL, lora=16, lora_targets=ATTENTION)
    store(folder, point(16, weight_of(SHAPES["1b"], ATTENTION)), case)
    assert main(["--dir", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fit"]["adapters"] == pytest.approx(ADAPTERS)
    assert found["fit"]["bf16_base"] == pytest.approx(BF16)
    assert [row["rank"] for row in found["cases"]] == [0, 8, 16, 32, 16]
    assert "predicted" not in found["cases"][0]


def test_baselines_of_different_sessions_are_named(folder, capsys):
    store(folder, point(64), replace(FULL, lora=64), commit="ba9876543210")
    main(["--dir", str(folder)])
    assert "note: from 2 sessions" in capsys.readouterr().out


def test_too_few_baselines_name_the_command_that_measures_more(tmp_path, capsys):
    store(tmp_path, point(8), replace(FULL, lora=8))
    assert main(["--dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "rank 8" in said
    assert said.count("benchmarks/claims/test_measure.py") == 1
    assert '-k "1b-torchao-tensorwise-lora" --fp8-gpu=h200 --fp8-update' in said


def test_a_baseline_of_another_definition_does_not_count(folder, capsys):
    old = replace(FULL, lora=8)
    path = folder / "h200" / f"{old.id}.json"
    edit(path, lambda data: data.update(case_hash="0" * 16))
    assert main(["--dir", str(folder)]) == 2
    assert "rank 16, rank 32" in capsys.readouterr().err


def test_a_baseline_without_times_says_so(folder, capsys):
    case = replace(FULL, lora=64)
    write_baseline(folder, baseline(case.id, case.digest(), metrics={"fp8_layers": [112]}))
    assert main(["--dir", str(folder)]) == 2
    assert "no step times" in capsys.readouterr().err
