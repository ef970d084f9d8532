"""Baselines written by hand: the fields that each of them has, for tests that care about others; a sound one, a session
behind it, and what is read of them in a folder."""

from __future__ import annotations

import json
import math
from statistics import median

from pytest_fp8.baselines.record import Baseline, StoredSession, digest
from pytest_fp8.baselines.store import Folder, read_baseline

ORIGIN = {
    "date": "2026-11-20",
    "commit": "0123456789ab",
    "dirty": False,
    "gpu": {"name": "NVIDIA H200", "driver": "580.1"},
    "libraries": {"torch": "1.0.0"},
    "reason": "first",
    "run": "0123456789ab",
}
"""Where a session comes from: every field that provenance must have."""


def session(metrics=None, **origin):
    """A stored session; a speedup gets the step times of its processes beside it. With busy times it is
    host-bound."""
    metrics = dict(metrics or {"fp8_share": [0.5]})
    if "speedup" in metrics and "bf16_ms" not in metrics:
        metrics["bf16_ms"] = [100.0] * len(metrics["speedup"])
    if "speedup" in metrics and "fp8_ms" not in metrics:
        pairs = zip(metrics["bf16_ms"], metrics["speedup"], strict=True)
        metrics["fp8_ms"] = [ms / math.exp(median(blocks)) for ms, blocks in pairs]
    return StoredSession(**{**ORIGIN, **origin}, metrics=metrics, host_bound="busy_speedup" in metrics)


def baseline(case, case_hash, gpu="h200", metrics=None, **origin):
    """A baseline of one session."""
    return Baseline(case, case_hash, gpu, (session(metrics=metrics, **origin),))


def edit(path, change, sign=True):
    """Change a file by hand: ``change`` gets its data. With ``sign`` the digest is made to fit, as a forger would."""
    data = json.loads(path.read_text())
    change(data)
    if sign:
        data["digest"] = digest(data)
    path.write_text(json.dumps(data))


GOOD = baseline("1b-torchao-rowwise", "abc", metrics={"speedup": [[0.1, 0.11], [0.12, 0.1]], "fp8_share": [0.78]})
LATER = session(metrics={"fp8_share": [0.8]}, date="2026-11-21", run="b" * 12)


def read(folder, gpu="h200", case="1b-torchao-rowwise", case_hash="abc"):
    source = folder if isinstance(folder, Folder) else Folder(folder)
    return read_baseline(source, gpu, case, case_hash)
