"""Sessions on a GPU that is not there: a further test for them, their options, and what they store."""

from __future__ import annotations

import json

from helpers.fakes import H200, asks, install

CHECKPOINTS = asks("checkpoints")
"""A further test for `helpers.fakes.SUITE`."""

FILE = "baselines/h200/tiny-torchao-rowwise.json"


def update(reason="first", *more):
    return ("--fp8-gpu=h200", f"--fp8-update={reason}", *more)


UPDATE = update()


def with_baselines(suite, monkeypatch):
    """The suite after a first update."""
    install(monkeypatch, H200)
    assert suite.runpytest(*UPDATE).ret == 0
    return suite


def sessions(suite, file=FILE):
    """The stored sessions, the oldest first."""
    return json.loads((suite.path / file).read_text())["sessions"]
