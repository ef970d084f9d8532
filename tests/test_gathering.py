"""A pair's evidence for several questions, gathered together: interrupts, errors, and what they share."""

from __future__ import annotations

import tempfile
import threading

import pytest

from helpers.fakes import H100, FakeProcess
from helpers.pairs import live_pair
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.coroutines import NAME
from pytest_fp8.codes import R


@pytest.fixture
def pair(monkeypatch):
    with live_pair(monkeypatch, H100, Case("8b", "torchao", "tensorwise")) as pair:
        yield pair


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_all_that_gathers(pair, monkeypatch, stop):
    folders, ended = [], []

    def one():
        with tempfile.TemporaryDirectory() as folder:
            folders.append(folder)
            try:
                pair.bf16.request("park")
                pair.fp8.request("restart", seed=0)
            finally:
                ended.append("one")
                pair.bf16.request("park")  # must not hang

    def interrupt(*_, **__):
        raise stop

    monkeypatch.setattr(FakeProcess, "restart", interrupt)
    with pytest.raises(stop):
        pair.gather({"one": one, "two": lambda: pair.fp8.request("park"), "three": lambda: pair.bf16.request("park")})
    assert ended == ["one"]
    import os

    assert not os.path.exists(folders[0])
    assert NAME not in [thread.name for thread in threading.enumerate()]
    assert pair.gather({"again": lambda: pair.bf16.request("park")}) == {}, "the pair can be asked again"


def test_an_interrupt_while_a_question_computes_ends_it_at_its_next_request(pair, monkeypatch):
    import signal

    computing = threading.Event()

    def compute():
        computing.set()
        threading.Event().wait(0.2)
        pair.bf16.request("park")
        raise AssertionError("goes on")

    def press():
        computing.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        pair.gather({"one": compute})
    presses.join()
    assert NAME not in [thread.name for thread in threading.enumerate()]


def test_evidence_that_one_question_is_gathering_no_other_asks(pair):
    asked = []

    def layers():
        asked.append("begins")
        pair.fp8.request("park")
        pair.bf16.request("park")
        return "evidence"

    errors = pair.gather({name: lambda: pair.once("layers", layers) for name in ("one", "two", "three")})
    assert not errors
    assert asked == ["begins"]
    assert pair.once("layers", lambda: "another") == "evidence"


def test_who_waits_for_evidence_that_fails_asks_for_itself(pair):
    tries = []

    def ask():
        pair.fp8.request("park")
        tries.append(1)
        if len(tries) == 1:
            raise ArmError(R.ARM_RAISED, "once")
        return "evidence"

    errors = pair.gather({name: lambda: pair.once("it", ask) for name in ("one", "two")})
    assert [str(error) for error in errors.values()] == ["FP8-R04: once"]
    assert pair.once("it", lambda: "another") == "evidence"
