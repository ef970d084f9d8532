"""The baselines in this repository: readable, of cases the suite has, and of those cases as they are defined today."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from pytest_fp8.baselines.history import components_in
from pytest_fp8.baselines.source import Folder
from pytest_fp8.baselines.store import load_baseline, read_baseline
from pytest_fp8.stats.looks import processes_hold

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "baselines", ROOT / "benchmarks/claims/measured")
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("[!_]*.json"))


@pytest.fixture(scope="module")
def cases():
    sys.path.insert(0, str(ROOT / "suites"))
    import matrix
    from benchmarks.claims import cases

    of_claims = {case.id: case for case in [*cases.ALL, cases.RECOMPUTED_LOOP]}
    return dict(zip(FOLDERS, ({case.id: case for case in matrix.ALL + matrix.OWN}, of_claims), strict=True))


def test_there_are_some():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_stored_baseline_belongs_to_a_case_of_the_suite(path, cases):
    stored, folder = load_baseline(path), path.parents[1]
    assert stored.case in cases[folder], "orphaned: the suite has no such case"
    case = cases[folder][stored.case]
    # The hash of an own model's case needs its reference arm on a GPU: a run with --fp8-gpu holds it against this file.
    digest = stored.case_hash if case.model == "own" else case.digest()
    assert re.fullmatch("[0-9a-f]{16}", digest)
    assert read_baseline(folder, path.parent.name, path.stem, digest) == stored


def test_a_case_with_figures_to_store_asks_its_layers(cases):
    """An update stores nothing of a case whose FP8 was not shown to run."""
    measured = [case for folder in cases.values() for case in folder.values() if case.needs_gpu]
    kept = [case for case in measured if {"speedup", "memory", "loss"} & {*case.questions}]
    assert kept
    assert [case.id for case in kept if not case.asks("layers") and case.backend != "bf16"] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_stored_baseline_says_where_it_came_from_and_not_from_whom(path):
    for session in load_baseline(path).sessions:
        assert session.reason
        assert re.fullmatch(r"[0-9a-f]{12}", session.commit)
        assert session.gpu["name"] == {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}[path.parent.name]
        assert "/" not in json.dumps(session.libraries)


def has_speedup(path):
    return bool(load_baseline(path).values("speedup"))


@pytest.mark.parametrize("path", [path for path in FILES if has_speedup(path)], ids=lambda p: p.stem)
def test_a_case_gates_at_what_its_baseline_can_hold_and_not_far_above(path, cases):
    """A tolerance above the usual one is for what scatters, and no wider than asked for where it scatters most."""
    case = cases[path.parents[1]][path.stem]
    tolerance = case.tolerance
    assert not case.asks("speedup") or could_hold(path) <= tolerance
    assert tolerance <= max(0.02, 1.6 * max(could_hold(x) for x in FILES if x.name == path.name and has_speedup(x)))


def could_hold(path):
    """With the variances of its GPU, as an update and a gate have them."""
    stored, components = load_baseline(path), components_in(Folder(path.parents[1]), path.parent.name)
    return processes_hold(stored.values(stored.gated), components, busy=stored.host_bound)
