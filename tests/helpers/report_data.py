"""A report of invented figures, with everything that the page shows."""

from __future__ import annotations

from pytest_fp8.report.rows import Curve, Evidence, LayerShown, Origin, Report, Row, Said
from pytest_fp8.verdicts import Verdict

HOSTILE = "<script>alert(1)</script>\"'&$x_{$ </svg></pre>\x1b[31m{{ 7 * 7 }}"
NAME = "model.layers.0.mlp"
ORIGIN = Origin("2026-11-22", "abc", False, {"name": "NVIDIA H200"}, {"torch": "2.11.0"}, "", "0" * 12)


def said(verdict="PASS", message="", code=None, **numbers):
    return Said(Verdict(verdict), code, f"{verdict} it is", message or verdict, numbers)


def kinds(activations):
    return {"weights": 2.0, "activations": activations, "cache": 0.5}


def row_of(name="1b-te-delayed", **changed):
    """A case on a GPU of which all is known; ``changed``: fields of the row."""
    decisions = {
        "loss": said(gap=0.001, margin=0.02),
        "speedup": said(speedup=1.13, low=1.12, high=1.14, baseline=1.12, account={"limit": 1.3}),
        "memory": said(ratio=0.9, phases={"forward": 1.0}, kinds=kinds(7.25), bf16_kinds=kinds(9.0)),
    }
    evidence = Evidence(
        [Curve(0, [5.0, 4.0, 3.0], [5.0, None, 3.1])],
        [LayerShown(NAME, "", {"fprop": "fp8"}, {"fprop": 28.5, "wgrad": None}, {"fprop": 28.6}, 0.08, 0.25)],
        [said("INVALID", "INVALID FP8-D15: relu\n  cause:    relu", "FP8-D15")],
    )
    blocks = {"processes": [{"bf16": [120.0, 121.0, 122.0, 120.0], "fp8": [106.0, 107.0, 106.0, 105.0]}]}
    return Row(name, **{"gpu": "h200", "decisions": decisions, "timing": blocks, "evidence": evidence, **changed})


def report_of(*rows, **changed):
    """A report of these cases; ``changed``: fields of the report."""
    facts = {"not_run": {}, "ran": 1, "ran_on_gpu": 1, "collected": [], "partial": False, "durations": {}}
    facts |= {"failed_tests": [], "open_tests": {}, "finished": True, "problems": [], "provenance": ORIGIN}
    return Report(2, {row.case: row for row in rows}, **{**facts, **changed})
