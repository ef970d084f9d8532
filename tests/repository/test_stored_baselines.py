"""The baselines in this repository: readable, of cases the suite has, and of those cases as they are defined today."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from pytest_fp8.baselines.store import Folder, components_in, load_baseline, read_baseline
from pytest_fp8.stats.looks import processes_hold

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "baselines", ROOT / "benchmarks/claims/measured")
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("[!_]*.json"))


@pytest.fixture(scope="module")
def cases():
    sys.path.insert(0, str(ROOT / "suites"))
    import matrix
    from benchmarks.claims import cases

    of_claims = {case.id: case for case in [*cases.ALL, cases.RECOMPUTED_LOOP]}
    return dict(zip(FOLDERS, ({case.id: case for case in matrix.ALL + matrix.OWN}, of_claims), strict=True))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_stored_baseline_is_of_a_case_as_it_is_today_and_says_where_it_came_from(folder, cases):
    found = {path: load_baseline(path) for path in FILES if path.is_relative_to(folder)}
    assert found
    for path, stored in found.items():
        assert stored.case in cases[folder], "orphaned: the suite has no such case"
        case = cases[folder][stored.case]
        # The hash of an own model's case needs its reference arm on a GPU: a run with --fp8-gpu holds it against it.
        digest = stored.case_hash if case.model == "own" else case.digest()
        assert re.fullmatch("[0-9a-f]{16}", digest)
        assert read_baseline(Folder(folder), path.parent.name, path.stem, digest) == stored
        for session in stored.sessions:
            assert session.reason
            assert re.fullmatch(r"[0-9a-f]{12}", session.commit)
            assert session.gpu["name"] == {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}[path.parent.name]
            assert "/" not in json.dumps(session.libraries), "not from whom"


def test_a_case_with_figures_to_store_asks_its_layers(cases):
    """An update stores nothing of a case whose FP8 was not shown to run."""
    measured = [case for folder in cases.values() for case in folder.values() if case.needs_gpu]
    kept = [case for case in measured if {"speedup", "memory", "loss"} & {*case.questions}]
    assert kept
    assert [case.id for case in kept if not case.asks("layers") and case.backend != "bf16"] == []


def test_a_case_gates_at_what_its_baseline_can_hold_and_not_far_above(cases):
    """A tolerance above the usual one is for what scatters, and no wider than asked for where it scatters most."""
    spread = {(folder, gpu): components_in(Folder(folder), gpu) for folder in FOLDERS for gpu in ("h100", "h200")}
    held = {}
    for path in FILES:
        if (stored := load_baseline(path)).values("speedup"):
            components = spread[path.parents[1], path.parent.name]
            held[path] = processes_hold(stored.values(stored.gated), components, busy=stored.host_bound)
    for path, could_hold in held.items():
        case = cases[path.parents[1]][path.stem]
        assert not case.asks("speedup") or could_hold <= case.tolerance, path
        assert case.tolerance <= max(0.02, 1.6 * max(each for x, each in held.items() if x.name == path.name)), path
