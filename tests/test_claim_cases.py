"""Cases that claims alone need: where their figures are stored, and how they are measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matrix
from benchmarks.claims import CLAIMS, cases
from benchmarks.claims.stored import BASELINES, MEASURED, measure, stored_on
from helpers.claims import CASE, OTHER, baseline, speed
from helpers.fakes import H200, install
from pytest_fp8 import Case
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.cli import main as command_line

ROOT = Path(__file__).parent.parent


def test_each_case_of_a_claim_is_one_of_the_suite_s_or_of_those_measured_for_claims():
    there = {case.id for case in [*matrix.ALL, *cases.ALL]}
    asked = [case for claim in CLAIMS for near in claim.cases for case in (near.case, near.other) if case]
    assert not [case.id for case in asked if case.id not in there]


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
    assert suite.startswith(f'pytest suites -k "[{tensorwise.id}]" --fp8-gpu=h200 --fp8-update')
    assert here.startswith(f"pytest benchmarks/claims/test_measure.py --fp8-baselines {MEASURED} -k")
    assert f'-k "[{CASE.id}]" --fp8-gpu=h200 --fp8-update="why"' in here


def test_an_update_of_the_measuring_tests_stores_the_figures_beside_the_claims(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile((ROOT / "benchmarks/claims/test_measure.py").read_text())
    where = ("--fp8-baselines", "benchmarks/claims/measured", "--fp8-gpu=h200")
    result = pytester.runpytest("-k", f"[{CASE.id}]", *where, "--fp8-update=torch 2.13")
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
