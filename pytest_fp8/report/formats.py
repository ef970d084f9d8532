"""A report's figures as other tools read them: Bencher, github-action-benchmark, and the properties of a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fp8.report.cells import interval_of, number, speed_in

BENCHER, ACTION = "bencher.json", "benchmark-action.json"
"""Bencher Metric Format (`bencher run --adapter json --file`), and `tool: customBiggerIsBetter`."""
PATHS = {
    "fp8_share": ("layers", "fp8_share"),
    "loss_gap": ("loss", "gap"),
    "memory_ratio": ("memory", "ratio"),
}
"""Figure -> question, and name among its numbers."""


def figures(entry: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a case that were measured: shares and ratios as numbers, the loss gap in nats."""
    said = entry["decisions"]
    middle, low, high = interval_of(entry)
    found = {name: number(said, question, "numbers", field) for name, (question, field) in PATHS.items()}
    found |= {"speedup": middle, "speedup_low": low, "speedup_high": high}
    found["speedup_limit"] = number(speed_in(said), "numbers", "account", "limit")
    return {name: value for name, value in found.items() if value is not None}


def properties(case: str, verdict: str, decisions: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, object]]:
    """Of a test, as JUnit files have them. ``decisions``: those that the test asked for, by question."""
    said = figures({"decisions": decisions})
    headlines = [("fp8_headline", decision["headline"]) for decision in decisions.values()][-1:]
    codes = [("fp8_code", code) for decision in decisions.values() if (code := decision.get("code"))][-1:]
    measured = [(name if name.startswith("fp8_") else f"fp8_{name}", round(value, 6)) for name, value in said.items()]
    return [("fp8_case", case), ("fp8_verdict", verdict), *codes, *headlines, *measured]


def shown_verdict(decisions: Mapping[str, Mapping[str, Any]]) -> str:
    """The worst verdict among the decisions of a test that passed; it is shown in place of PASSED."""
    said = {decision["verdict"] for decision in decisions.values()}
    return next((word for word in ("INVALID", "INCONCLUSIVE", "NOT_EXERCISED", "IMPROVED") if word in said), "PASS")


def told_verdict(report: Any, decisions: Mapping[str, Mapping[str, Any]]) -> str:
    """The verdict of a test for other tools. ``report``: pytest's, of its call. One that failed as expected has FAIL,
    or the missing answer that it failed with."""
    if report.passed:
        return shown_verdict(decisions)
    said = {decision["verdict"] for decision in decisions.values()}
    if report.skipped and not hasattr(report, "wasxfail"):
        return "NOT_EXERCISED"
    return "FAIL" if report.failed else next((w for w in ("FAIL", "INVALID", "INCONCLUSIVE") if w in said), "FAIL")


def bencher(report: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Case -> measure -> its value, with the ends of the speedup's interval."""
    found = {}
    for case, entry in report["entries"].items():
        said = figures(entry)
        measures = {name: {"value": said[name]} for name in ("speedup", *PATHS) if name in said}
        if "speedup_low" in said and "speedup_high" in said:
            measures["speedup"] |= {"lower_value": said["speedup_low"], "upper_value": said["speedup_high"]}
        if measures:
            found[case] = measures
    return found


def benchmark_action(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The speedups, of which more is better."""
    found = []
    for case, entry in report["entries"].items():
        middle, low, high = interval_of(entry)
        if middle is not None:
            spread = {} if low is None or high is None else {"range": f"{(high - low) / 2:.4f}"}
            found.append({"name": f"{case}: FP8 over BF16", "unit": "x", "value": middle} | spread)
    return found
