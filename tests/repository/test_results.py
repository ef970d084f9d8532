"""The cells of ``python -m benchmarks.results``; test_docs.py holds the page against the stored baselines."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.results import markdown
from helpers.baselines import baseline, session
from pytest_fp8.baselines.store import read_folder, readable, write_baseline

H200 = {"name": "NVIDIA H200", "driver": "580.1", "power_limit": 700.0}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """``stored(case, gpu, device, **metrics)`` writes a baseline of the project in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(case, gpu="h200", device=H200, commit="0123456789ab", **metrics):
        libraries = {"torch": "2.11.0", "transformer-engine": "2.20.2", "triton": "3.6.0"}
        metrics = {"fp8_layers": [28], **metrics}
        origin = {"gpu": device, "libraries": libraries}
        made = baseline(case, "hash", gpu, metrics, commit=commit)
        made = replace(made, sessions=(replace(made.newest, **origin),))
        write_baseline(tmp_path / "baselines", made)

    return write


def lines():
    found = readable(read_folder(Path("baselines")))
    return markdown([stored for _, stored in sorted(found.items())], Path("baselines"))


def test_what_the_newest_measurement_has_not_says_which_one_it_is_of(stored):
    figures = {"fp8_share": [0.8], "speedup": [[0.1, 0.1], [0.1, 0.1]], "memory_ratio": [1.2]}
    sessions = [
        session(metrics={"loss_gap": [0.01, 0.02]}, commit="aaaaaaaaaaaa"),
        session(metrics=figures, commit="bbbbbbbbbbbb"),
        session(metrics={"memory_ratio": [1.1]}, commit="cccccccccccc"),
    ]
    made = baseline("1b-te-block", "hash", "h200", {}, commit="x")
    write_baseline(Path("baselines"), replace(made, sessions=tuple(sessions)))
    page = lines()
    [row] = [line for line in page if line.startswith("| `1b-te-block` | -")]
    assert row.endswith("| 1.100x | 1; FP8, speed 2; loss 3 |")
    for number, commit in enumerate("cba", 1):
        assert any(line.startswith(f"{number}. 2026-11-20, commit {commit * 12}") for line in page)


def test_an_arm_that_waits_for_its_host_is_compared_by_its_busy_time(stored):
    stored("1b-te-block", gpu="h100", speedup=[[0.0, 0.0]] * 2, busy_speedup=[[0.1, 0.1], [0.1, 0.1]])
    stored("1b-te-block", speedup=[[0.2, 0.2], [0.2, 0.2]])
    assert "| `1b-te-block` | 1.105x (busy) | 1.221x | - | - |" in lines()


ACCOUNT = {
    "bf16_busy_ms": [98.0],
    "fp8_busy_ms": [85.0],
    "earned_ms": [20.0],
    "casts_ms": [9.0],
    "speedup_limit": [1.25],
}


def test_the_account_of_a_baseline_is_a_row(stored):
    stored("1b-te-block", speedup=[[0.1, 0.1], [0.1, 0.1]], **ACCOUNT)
    stored("1b-te-current", speedup=[[0.1, 0.1], [0.1, 0.1]])
    page = lines()
    start = page.index("### h200: where a step goes")
    rows = [line for line in page[start : page.index("### h200: measurements")] if line.startswith("| `")]
    # 90.48 - 100 + 20 - 9 is what neither products nor casts explain.
    told = "100.0 | 90.5 | 98.0 / 85.0 | 2.0% / 6.1% | - | 20.0 | +9.0 | +1.5 | 1.105x | 1.25x | 42%"
    assert rows == [f"| `1b-te-block` | {told} |"]
    assert "## By the number of GPUs" not in page
