"""Claims: the rule on one interval, and the page of this repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.claims import cases
from benchmarks.claims.__main__ import (
    BASELINES,
    DID_NOT_HOLD,
    HELD,
    MEASURED,
    NOT_REPRODUCED,
    PARTLY,
    Claim,
    Reading,
    all_claims,
)
from pytest_fp8.cli import main as command_line

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("compare", "claimed", "measured", "word"),
    [
        ("at_least", 1.3, (1.144, 1.154), DID_NOT_HOLD),
        ("at_least", 1.3, (1.28, 1.29), HELD),
        ("at_least", 1.3, (1.26, 1.28), PARTLY),
        ("at_least", [1.7, 2.2], (1.75, 1.8), HELD),
        ("at_least", [1.7, 2.2], (2.9, 3.0), DID_NOT_HOLD),
        ("at_most", 0.6, (1.16, 1.16), DID_NOT_HOLD),
        ("at_most", 0.6, (0.3, 0.3), HELD),
        ("about", 0.82, (0.815, 0.83), HELD),
        ("about", 0.82, (1.29, 1.31), DID_NOT_HOLD),
        ("about", 0.82, (0.5, 1.5), PARTLY),
        ("about", 0, (28, 28), DID_NOT_HOLD),
        ("at_least", -0.1, (-0.101, 0.2), HELD),
    ],
)
def test_a_claim_is_held_against_the_whole_interval(compare, claimed, measured, word):
    """What a reading is made of, and in what it differs from the claim, is on the page below."""
    one = Claim("it is so", {"name": "somebody"}, [], "speedup", **{compare: claimed})
    reading = Reading(sum(measured) / 2, *measured)
    assert one.verdict(reading, same=True) == word
    assert one.verdict(reading, same=False) == (NOT_REPRODUCED if word == DID_NOT_HOLD else word)


def test_published_claims_have_an_address():
    assert all(("url" in one.source) == (one.source.get("kind") == "published") for one in all_claims())


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
    assert command_line(["baselines", "check", "--dir", str(MEASURED), "--suite", "benchmarks/claims/cases.py"]) == 0
    assert "0 error(s)" in capsys.readouterr().out
    stored = [path.stem for folder in (BASELINES, MEASURED) for path in (ROOT / folder / "h200").glob("[!_]*.json")]
    assert len(stored) == len(set(stored)), "stored twice"


@pytest.mark.nightly
def test_the_measuring_tests_ask_each_case_all_that_it_can_answer():
    chosen = ["--collect-only", "-q", "-p", "no:cacheprovider", "benchmarks/claims/test_measure.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {line.partition("::test_")[2] for line in done.stdout.splitlines() if "::" in line}
    assert found == {f"{question}[{case.id}]" for case in cases.ALL for question in case.questions}
