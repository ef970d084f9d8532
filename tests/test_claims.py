"""What the stored baselines say about a claim: the rule, each kind of metric, and the page made from them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import matrix
from benchmarks.claims import CLAIMS, Claim, Near, Source, cases, judge
from benchmarks.claims.__main__ import main
from benchmarks.claims.claim import ABOUT, AT_LEAST, AT_MOST
from benchmarks.claims.judgement import (
    DID_NOT_HOLD,
    HELD,
    NOT_MEASURED,
    NOT_REPRODUCED,
    PARTLY,
    Reading,
    read,
    verdict,
)
from benchmarks.claims.page import markdown
from benchmarks.claims.stored import BASELINES, MEASURED, measure, stored_on
from helpers.baselines import baseline as stored
from helpers.fakes import H200, install
from pytest_fp8 import Case
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.cli import main as command_line
from pytest_fp8.errors import SettingsError

ROOT = Path(__file__).parent.parent
CASE, OTHER = Case("454m", "torchao", "tensorwise"), Case("454m", "transformer_engine", "delayed")
SOURCE, ONE = Source("somebody", gpu="h200"), (Near(CASE),)


def baseline(case=CASE, **metrics):
    return stored(case.id, case.digest(), metrics=metrics)


def speed(ratio, processes=4):
    return [[math.log(ratio)] * 6] * processes


def claim(metric="speedup", compare=AT_LEAST, low=1.3, high=None, cases=ONE, source=SOURCE):
    return Claim("one", "it is so", metric, compare, low, low if high is None else high, source, cases)


def reading(low, high):
    return Reading((low + high) / 2, low, high)


# -- the rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compare", "claimed", "measured", "word"),
    [
        (AT_LEAST, (1.3, 1.3), (1.144, 1.154), DID_NOT_HOLD),
        (AT_LEAST, (1.3, 1.3), (1.28, 1.29), HELD),
        (AT_LEAST, (1.3, 1.3), (1.26, 1.28), PARTLY),
        (AT_LEAST, (1.7, 2.2), (1.75, 1.8), HELD),
        (AT_LEAST, (1.7, 2.2), (2.9, 3.0), DID_NOT_HOLD),
        (AT_MOST, (0.6, 0.6), (1.16, 1.16), DID_NOT_HOLD),
        (AT_MOST, (0.6, 0.6), (0.3, 0.3), HELD),
        (ABOUT, (0.82, 0.82), (0.815, 0.83), HELD),
        (ABOUT, (0.82, 0.82), (1.29, 1.31), DID_NOT_HOLD),
        (ABOUT, (0.82, 0.82), (0.7, 0.81), PARTLY),
        (ABOUT, (0.82, 0.82), (0.5, 1.5), PARTLY),
        (ABOUT, (0, 0), (0, 0), HELD),
        (ABOUT, (0, 0), (28, 28), DID_NOT_HOLD),
        (AT_MOST, (0.02, 0.02), (-0.06, 0.018), HELD),
        (AT_LEAST, (-0.1, -0.1), (-0.101, 0.2), HELD),
    ],
)
def test_a_claim_is_held_against_the_whole_interval(compare, claimed, measured, word):
    one = claim(compare=compare, low=claimed[0], high=claimed[1])
    assert verdict(one, reading(*measured), same=True) == word
    assert verdict(one, reading(*measured), same=False) == (NOT_REPRODUCED if word == DID_NOT_HOLD else word)


@pytest.mark.parametrize(
    ("source", "differs", "said"),
    [
        (SOURCE, {}, {}),
        (SOURCE, {"batch": "another"}, {"batch": "another"}),
        (Source("somebody", gpu="h100"), {}, {"GPU": "H200 instead of H100"}),
        (Source("somebody"), {}, {"GPU": "H200, the claim's is not known"}),
        (Source("somebody", gpu="h200", gpus=8), {}, {"number of GPUs": "1 instead of 8"}),
    ],
)
def test_a_claim_did_not_hold_only_where_the_same_was_measured(source, differs, said):
    found = judge(claim(cases=(Near(CASE, differs),), source=source), {"h200": {CASE.id: baseline(speedup=speed(1.1))}})
    assert found.verdict == (NOT_REPRODUCED if said else DID_NOT_HOLD)
    assert found.differs == said


# -- metrics ------------------------------------------------------------------------------------------------------


def test_tokens_per_second_come_from_the_step_time_and_are_as_uncertain_as_hosts():
    stored = {CASE.id: baseline(fp8_ms=[10.0, 10.0])}
    found = read("fp8_tokens_per_s", Near(CASE), stored)
    assert found.value == pytest.approx(24 * 1024 / 0.010)
    assert (found.low, found.high) == pytest.approx((found.value * 0.95, found.value * 1.05))


def test_a_gain_over_another_case_is_the_ratio_of_their_speedups():
    stored = {CASE.id: baseline(speedup=speed(1.38)), OTHER.id: baseline(OTHER, speedup=speed(1.2))}
    found = read("speedup_over_other", Near(CASE, other=OTHER), stored)
    assert found.value == pytest.approx(1.15)
    assert found.low < 1.15 < found.high


@pytest.mark.parametrize(("arm", "expected"), [("bf16", 2.0), ("fp8", 2.5)])
def test_step_times_of_two_cases(arm, expected):
    stored = {CASE.id: baseline(fp8_ms=[20.0]), OTHER.id: baseline(OTHER, fp8_ms=[8.0], bf16_ms=[10.0])}
    assert read(f"step_over_other_{arm}", Near(CASE, other=OTHER), stored).value == pytest.approx(expected)


def test_the_share_of_the_adapters_is_found_again():
    share, gain = 0.4, 1.5
    adapted = 1 / ((1 - share) / gain + share)
    stored = {CASE.id: baseline(speedup=speed(adapted)), OTHER.id: baseline(OTHER, speedup=speed(gain))}
    found = read("adapter_share", Near(CASE, other=OTHER), stored)
    assert found.value == pytest.approx(share)
    assert found.low < share < found.high


def test_without_a_gain_in_full_training_there_is_no_share():
    stored = {CASE.id: baseline(speedup=speed(1.0)), OTHER.id: baseline(OTHER, speedup=speed(0.97))}
    assert read("adapter_share", Near(CASE, other=OTHER), stored) is None


def test_a_loss_gap_has_the_spread_of_its_seeds():
    few, many = (read("loss_gap", Near(CASE), {CASE.id: baseline(loss_gap=[0.0, 0.01] * n)}) for n in (1, 8))
    assert few.value == many.value == pytest.approx(0.005)
    assert few.low < many.low < 0.005 < many.high < few.high
    assert read("loss_gap", Near(CASE), {CASE.id: baseline(loss_gap=[0.0])}).high == math.inf


# -- which case answers -------------------------------------------------------------------------------------------


def test_the_nearest_case_that_was_measured_answers_and_the_nearer_one_is_named():
    found = judge(claim(cases=(Near(CASE), Near(OTHER))), {"h200": {OTHER.id: baseline(OTHER, speedup=speed(1.4))}})
    assert (found.verdict, found.near.case) == (HELD, OTHER)
    assert found.why == (f"no baseline of {CASE.id}",)


@pytest.mark.parametrize(
    ("about", "on", "answers", "differs"),
    [
        ("h100", {"h200": [CASE], "h100": [CASE]}, ("h100", CASE), {}),
        ("h200", {"h200": [CASE], "h100": [CASE]}, ("h200", CASE), {}),
        ("h100", {"h200": [CASE], "h100": [OTHER]}, ("h200", CASE), {"GPU": "H200 instead of H100"}),
        ("", {"h200": [OTHER], "h100": [CASE]}, ("h100", CASE), {"GPU": "H100, the claim's is not known"}),
    ],
)
def test_the_nearest_case_counts_first_and_then_the_claims_own_gpu(about, on, answers, differs):
    asked = claim(cases=(Near(CASE), Near(OTHER)), source=Source("somebody", gpu=about))
    stored = {gpu: {case.id: baseline(case, speedup=speed(1.4)) for case in cases} for gpu, cases in on.items()}
    found = judge(asked, stored)
    assert (found.gpu, found.near.case, found.differs) == (*answers, differs)


def test_the_number_of_gpus_is_that_of_the_case():
    pair = Case("8b", "torchao", "rowwise", seq=8192, batch=2, gpus=2, parallel="fsdp2")
    source = Source("somebody", gpu="h200", gpus=8)
    found = judge(claim(cases=(Near(pair),), source=source), {"h200": {pair.id: baseline(pair, speedup=speed(1.4))}})
    assert found.differs == {"number of GPUs": "2 instead of 8"}


def test_where_arms_wait_for_their_host_the_gpu_s_work_answers_and_that_is_no_such_speed():
    waits = baseline(speedup=speed(0.97), busy_speedup=speed(1.1))
    found = judge(claim(source=Source("somebody", gpu="h200")), {"h200": {CASE.id: waits}})
    assert found.reading.value == pytest.approx(1.1)
    assert "wait for their host" in found.differs["time"]
    assert found.verdict == NOT_REPRODUCED, "the steps may be as fast elsewhere"


def test_the_loss_of_a_model_that_learns_too_little_answers_nothing():
    large = Case("8b", "torchao", "tensorwise")
    stored = {"h200": {large.id: baseline(large, loss_gap=[0.0, 0.001, 0.002])}}
    found = judge(claim("loss_gap", AT_MOST, 0.02, cases=(Near(large),)), stored)
    assert found.verdict == NOT_MEASURED
    page = markdown([found], stored)
    assert any("| - | not measured here |" in line and "too few weights" in line for line in page)
    assert "## Not measured yet" not in page, "no measurement would answer it"


def test_a_baseline_of_another_definition_answers_nothing():
    old = replace(baseline(speedup=speed(1.4)), case_hash="0" * 16)
    found = judge(claim(), {"h200": {CASE.id: old}})
    assert found.verdict == NOT_MEASURED
    assert "another definition" in found.why[0]


def test_a_baseline_without_the_metric_answers_nothing():
    found = judge(claim("activation_ratio", AT_MOST, 0.5), {"h200": {CASE.id: baseline(speedup=speed(1.4))}})
    assert (found.verdict, found.why) == (NOT_MEASURED, (f"{CASE.id} has no activation_ratio",))


def test_what_was_not_measured_says_what_to_type_for_both_cases():
    found = judge(claim("speedup_over_other", cases=(Near(CASE, other=OTHER),)), {"h100": {}})
    assert found.verdict == NOT_MEASURED
    assert f'-k "[{CASE.id}] or [{OTHER.id}]" --fp8-gpu=h100' in found.command()


@pytest.mark.parametrize(
    "broken",
    [
        {"metric": "beauty"},
        {"compare": "nearly"},
        {"low": 2.0, "high": 1.0},
        {"cases": ()},
        {"cases": (Near(CASE, {"mood": "bad"}),)},
    ],
)
def test_a_claim_that_says_nothing_is_refused(broken):
    with pytest.raises(SettingsError):
        claim(**broken)
    with pytest.raises(SettingsError, match="second case"):
        claim("speedup_over_other")


# -- the claims and the command -----------------------------------------------------------------------------------


def test_claims_have_ids_of_their_own_and_published_ones_an_address():
    assert len({one.id for one in CLAIMS}) == len(CLAIMS)
    assert all(one.source.url.startswith("https://") == (one.source.kind == "published") for one in CLAIMS)


def test_the_page_in_this_repository_is_what_the_command_prints_now(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/claims.md").read_text(), (
        "make it again: python -m benchmarks.claims --markdown > docs/claims.md"
    )


def test_the_table_and_the_json_hold_every_claim(tmp_path, capsys):
    write_baseline(tmp_path, baseline(speedup=speed(1.149), fp8_ms=[8.0] * 4, bf16_ms=[8.0 * 1.149] * 4))
    assert main(["--baselines", str(tmp_path), "--json"]) == 0
    found = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert found.keys() == {one.id for one in CLAIMS}
    assert found["torchao-454m-speed"]["verdict"] == NOT_REPRODUCED
    assert found["torchao-454m-speed"]["differs"]["GPU"] == "H200 instead of H100"
    assert found["torchao-454m-rate"]["verdict"] == HELD
    assert found["torchao-350m-speed"]["command"].startswith("pytest benchmarks/claims/test_measure.py")
    assert found["guide-1b-speed"]["command"].startswith("pytest suites -k")
    assert main(["--baselines", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "1.149x" in table
    assert "--fp8-gpu=h200" in table


def test_baselines_that_cannot_be_read_are_an_error(tmp_path, capsys):
    assert main(["--baselines", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_another_gpu_has_no_answers(tmp_path, capsys):
    write_baseline(tmp_path, baseline(speedup=speed(1.4)))
    main(["--baselines", str(tmp_path), "--gpu", "h100", "--json"])
    assert {row["verdict"] for row in json.loads(capsys.readouterr().out)} == {NOT_MEASURED}


def test_the_command_loads_no_torch():
    code = (
        "import sys; from benchmarks.claims.__main__ import main; main([]);"
        "print([name for name in ('torch', 'pytest', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_each_case_of_a_claim_is_one_of_the_suite_s_or_of_those_measured_for_claims():
    there = {case.id for case in [*matrix.ALL, *cases.ALL]}
    asked = [case for claim in CLAIMS for near in claim.cases for case in (near.case, near.other) if case]
    assert not [case.id for case in asked if case.id not in there]


# -- figures that no gate asks ------------------------------------------------------------------------------------


def test_the_figures_measured_for_claims_are_of_their_cases_as_they_are_defined(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    check = ["baselines", "check", "--dir", str(MEASURED), "--suite", "benchmarks/claims/cases.py", "--json"]
    assert command_line(check) == 0
    found = json.loads(capsys.readouterr().out)
    without = {finding["case"] for finding in found if finding["kind"] == "unexercised"}
    assert without == {"1b-torchao-tensorwise-lora16", "1b-te-delayed-lora16"}, "stored with the suite's"


def test_no_figure_is_stored_twice():
    stored = [path.stem for folder in (BASELINES, MEASURED) for path in (ROOT / folder / "h200").glob("[!_]*.json")]
    assert len(stored) == len(set(stored))


def test_the_first_folder_that_has_a_case_counts(tmp_path):
    for folder, ratio in (("a", 1.1), ("b", 1.2)):
        write_baseline(tmp_path / folder, baseline(speedup=speed(ratio)))
    write_baseline(tmp_path / "b", baseline(OTHER, speedup=speed(1.3)))
    found = stored_on("h200", [tmp_path / "a", tmp_path / "b"])
    assert found.keys() == {CASE.id, OTHER.id}
    assert found[CASE.id].values("speedup") == speed(1.1)


def test_each_case_is_measured_where_its_figures_belong():
    tensorwise = Case("1b", "torchao", "tensorwise")
    both = measure([CASE.id, tensorwise.id], "h200", "why")
    suite, here = both.split(" && ")
    assert suite.startswith(f'pytest suites -k "[{tensorwise.id}]" --fp8-gpu=h200 --fp8-update-baselines')
    assert here.startswith(f"pytest benchmarks/claims/test_measure.py --fp8-baseline-dir {MEASURED} -k")
    assert f'-k "[{CASE.id}]" --fp8-gpu=h200 --fp8-update-baselines --fp8-reason "why"' in here


def test_an_update_of_the_measuring_tests_stores_the_figures_beside_the_claims(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile((ROOT / "benchmarks/claims/test_measure.py").read_text())
    where = ("--fp8-baseline-dir", "benchmarks/claims/measured", "--fp8-gpu=h200")
    result = pytester.runpytest("-k", f"[{CASE.id}]", *where, "--fp8-update-baselines", "--fp8-reason=torch 2.13")
    result.assert_outcomes(passed=5)
    stored = stored_on("h200", [pytester.path / "benchmarks/claims/measured"])
    assert stored[CASE.id].values("speedup")
    assert stored[CASE.id].case_hash == CASE.digest()


def test_the_measuring_tests_ask_each_case_all_that_it_can_answer():
    chosen = ["--collect-only", "-q", "-p", "no:cacheprovider", "benchmarks/claims/test_measure.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {line.partition("::test_")[2] for line in done.stdout.splitlines() if "::" in line}
    assert found == {f"{question}[{case.id}]" for case in cases.ALL for question in case.questions}
