"""The claims of this repository, and the page that the command makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.claims import cases
from benchmarks.claims.__main__ import BASELINES, MEASURED, all_claims, stored_on
from helpers.claims import CASE, OTHER, baseline, speed
from helpers.fakes import H200, install
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.cli import main as command_line

ROOT = Path(__file__).parent.parent


def test_published_claims_have_an_address_and_all_have_cases():
    """Reading refuses a case that neither the suite nor this folder has, and a comparison of another name."""
    found = all_claims().values()
    assert found
    assert all(one.source.url.startswith("https://") == (one.source.kind == "published") for one in found)
    assert all(
        (near.other is not None) == ("other" in one.metric or one.metric == "adapter_share")
        for one in found
        for near in one.cases
    )


def test_the_page_is_what_the_command_prints_without_torch():
    code = (
        "import sys; from benchmarks.claims.__main__ import main; main();"
        "print([name for name in ('torch', 'pytest', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    held = (ROOT / "docs/claims.md").read_text()
    assert done.stdout == held, "make it again: python -m benchmarks.claims > docs/claims.md"
    assert done.stderr == "[]\n"


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
