"""Baselines written by hand: the fields that each of them has, for tests that care about others."""

ORIGIN = {
    "date": "2026-11-20",
    "commit": "0123456789ab",
    "dirty": False,
    "gpu": {"name": "NVIDIA H200", "driver": "580.1"},
    "libraries": {"torch": "1.0.0"},
    "reason": "first",
}
"""Where a baseline comes from: every field that provenance must have."""
