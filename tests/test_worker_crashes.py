"""Workers of pytest-xdist that crash: no test is lost, none runs twice, and the next one has their GPU."""

from __future__ import annotations

import textwrap

import pytest

pytest.importorskip("xdist")

from helpers.workers import session_on_gpus


@pytest.fixture
def host(pytester, monkeypatch):
    return session_on_gpus(pytester, monkeypatch)


CRASHES = """
    import os
    from pathlib import Path
    import pytest
    from pytest_fp8 import Case

    CASES = [Case(m, "torchao", r) for m in ("tiny", "1b", "8b") for r in ("tensorwise", "rowwise")]

    def run(case, question):
        with Path("ran").open("a") as ran:
            ran.write(f"{question}[{case.id}] ")
        if (case.id, question) == ("1b-torchao-rowwise", "layers") and not Path("crashed").exists():
            Path("crashed").touch()
            os._exit(3)

    @pytest.mark.fp8(cases=CASES, question="layers")
    def test_layers(fp8_case):
        run(fp8_case, "layers")
"""
MORE_TESTS = """
    @pytest.mark.fp8(cases=CASES, question="loss")
    def test_loss(fp8_case):
        run(fp8_case, "loss")
"""


@pytest.mark.oldest
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, *(pytest.param(count, marks=pytest.mark.nightly) for count in (1, 3))])
@pytest.mark.parametrize(
    "more",
    # What the scheduler is told of a crash is the same with two tests a case.
    [pytest.param("", id="one test a case", marks=pytest.mark.nightly), pytest.param(MORE_TESTS, id="two")],
)
def test_a_worker_that_crashes_takes_no_test_with_it_and_nobody_waits(host, pytester, monkeypatch, workers, more):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(CRASHES + more)
    result, _ = host(workers, f"-n{workers}", "--fp8-gpu=h200")
    ran = (pytester.path / "ran").read_text().split()
    assert len(set(ran)) == (12 if more else 6), "each test ran"
    assert len(set(ran)) == len(ran), "and none twice: one that kills its worker would kill the next"
    result.stdout.fnmatch_lines(["*worker*crashed while running*layers?1b-torchao-rowwise?*"])


CRASHES_ONCE = """
    import os, time
    from pathlib import Path
    import pytest
    from pytest_fp8.gpu import detect

    @pytest.mark.parametrize("number", range(12))
    def test_any(number, worker_id):
        with Path("ran").open("a") as ran:
            ran.write(f"{worker_id} {detect()[0].index} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
        if worker_id == CRASHES:
            os._exit(3)
        # The others leave it something to do.
        deadline = time.monotonic() + 40
        while worker_id != "gw3" and "gw3" not in Path("ran").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
"""


@pytest.mark.oldest
@pytest.mark.slow
@pytest.mark.parametrize("crashes", ["gw1", *(pytest.param(gw, marks=pytest.mark.nightly) for gw in ("gw0", "gw2"))])
def test_a_worker_that_stands_in_for_a_crashed_one_takes_its_gpu(host, pytester, monkeypatch, crashes):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(f"CRASHES = {crashes!r}\n" + textwrap.dedent(CRASHES_ONCE))
    host(3, "-n3", "--fp8-gpu=h200")
    ran = {tuple(line.split()) for line in (pytester.path / "ran").read_text().splitlines()}
    number = crashes[-1]
    assert ran == {*((f"gw{each}", each, f"GPU-{each}") for each in "012"), ("gw3", number, f"GPU-{number}")}
