"""What this repository stores of GPUs: baselines that gate, figures that pages quote, and claims that are held against
both. Each is readable, of a case as it is defined today, and says where it came from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import matrix
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
from pytest_fp8.baselines.store import Folder, components_in, load_baseline
from pytest_fp8.cli import main as command_line
from pytest_fp8.stats.looks import processes_hold

ROOT = Path(__file__).parents[2]
NAMED = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}
CASES = {
    folder: {case.id: case for case in every}
    for folder, every in {BASELINES: matrix.ALL + matrix.OWN, MEASURED: [*cases.ALL, cases.RECOMPUTED_LOOP]}.items()
}
STORED = {
    path: (load_baseline(path), CASES[folder])
    for folder in CASES
    for path in sorted((ROOT / folder).rglob("[!_]*.json"))
}
"""Baseline -> its content and the cases of its suite."""


# -- baselines and figures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "suite"), [(BASELINES, "suites/matrix.py"), (MEASURED, "benchmarks/claims/cases.py")], ids=str
)
def test_the_command_finds_each_file_sound_and_of_a_case_as_it_is_today(monkeypatch, capsys, folder, suite):
    monkeypatch.chdir(ROOT)
    assert command_line(["baselines", "check", "--dir", str(folder), "--suite", suite]) == 0
    assert " 0 error(s)" in capsys.readouterr().out


def test_what_is_stored_is_of_a_case_and_says_where_it_came_from():
    """Those of own models, too, which the command knows nothing of."""
    assert all(any(path.is_relative_to(ROOT / folder) for path in STORED) for folder in CASES), "an empty folder"
    for path, (stored, of) in STORED.items():
        assert stored.case in of, "orphaned: the suite has no such case"
        assert re.fullmatch("[0-9a-f]{16}", stored.case_hash)
        for session in stored.sessions:
            assert session.reason
            assert re.fullmatch(r"[0-9a-f]{12}", session.commit)
            assert session.gpu["name"] == NAMED[path.parent.name]
            assert "/" not in json.dumps(session.libraries), "not from whom"
    on_h200 = [path.name for path in STORED if path.parent.name == "h200"]
    assert len(on_h200) == len(set(on_h200)), "stored twice"


def test_a_case_with_figures_to_store_asks_its_layers():
    """An update stores nothing of a case whose FP8 was not shown to run."""
    measured = [case for of in CASES.values() for case in of.values() if case.needs_gpu]
    kept = [case for case in measured if {"speedup", "memory", "loss"} & {*case.questions}]
    assert kept
    assert [case.id for case in kept if not case.asks("layers") and case.backend != "bf16"] == []


def test_a_case_gates_not_far_above_what_its_baselines_can_hold():
    """A tolerance above the usual one is for what scatters, and no wider than asked for where it scatters most."""
    spread = {gpu: components_in(Folder(gpu.parent), gpu.name) for gpu in {path.parent for path in STORED}}
    held: dict[str, float] = {}
    for path, (stored, _) in STORED.items():
        if stored.values("speedup"):
            holds = processes_hold(stored.values(stored.gated), spread[path.parent], busy=stored.host_bound)
            held[stored.case] = max(held.get(stored.case, 0.0), holds)
    tolerances = {stored.case: of[stored.case].tolerance for stored, of in STORED.values() if stored.case in held}
    assert {name: each for name, each in tolerances.items() if each > max(0.02, 1.6 * held[name])} == {}


# -- claims -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.nightly
def test_the_measuring_tests_ask_each_case_all_that_it_can_answer():
    chosen = ["--collect-only", "-q", "-p", "no:cacheprovider", "benchmarks/claims/test_measure.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {line.partition("::test_")[2] for line in done.stdout.splitlines() if "::" in line}
    assert found == {f"{question}[{case.id}]" for case in cases.ALL for question in case.questions}
