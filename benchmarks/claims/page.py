"""Claims and their verdicts: as a table, as a page of Markdown, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.claims.claim import METRICS
from benchmarks.claims.judgement import (
    BETWEEN_HOSTS,
    DID_NOT_HOLD,
    HELD,
    LEARNS_TOO_LITTLE,
    NOT_MEASURED,
    NOT_REPRODUCED,
    PARTLY,
    TOLERANCE,
    Finding,
)
from benchmarks.claims.stored import MEASURED
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.report.baselines import libraries_of

COLUMNS = ("claim", "what it says", "figure", "case", "measured", "")
STYLE = {HELD: "green", DID_NOT_HOLD: "red", NOT_REPRODUCED: "magenta", PARTLY: "yellow", NOT_MEASURED: "dim"}
RULE = f"""\
Each measurement is an interval: 99 % for a speedup, what sessions on other machines differ by included; 95 % on each
side over seeds for a loss gap; step times of two cases and tokens per second are widened by {BETWEEN_HOSTS:.0%}, which
hosts differ by. A claimed ratio or rate is widened by {TOLERANCE:.0%} at each end, a gap in nats and a number of layers
are not. `at least` one figure is kept by all above it, `at most` one by all below it; `about` one is what somebody saw.
A range is kept by what lies within it.

A claim *held* where the whole interval lies inside, and held *partly* where it reaches across an end, or is too wide to
tell. Where all of it lies outside, the claim *did not hold* if the same configuration was measured here, and was *not
reproduced here* if the configuration differs: what somebody saw elsewhere may have been so there. The last column
names the case that was measured, and in what it differs from what the claim is about."""
HEAD = ("| claim | figure | measured | verdict | measured with, and what differs |", "|---|---|---|---|---|")
METRIC_NAMES = {
    "speedup": "speed over BF16",
    "memory_ratio": "peak memory over BF16",
    "activation_ratio": "activations over BF16",
    "loss_gap": "loss above BF16",
    "fp8_layers": "FP8 layers",
    "fp8_tokens_per_s": "FP8",
    "bf16_tokens_per_s": "BF16",
    "speedup_over_other": "speed over the other case",
    "step_over_other_bf16": "step over the other's BF16 step",
    "step_over_other_fp8": "step over the other's FP8 step",
    "adapter_share": "adapters' share of the BF16 step",
}


def print_claims(findings: Sequence[Finding]) -> None:
    """One line per claim, then what to type for those that no baseline answers."""
    from pytest_fp8.report.tables import table

    rows = [
        (f.claim.id, f.claim.says, f.claim.figure, _cases(f), f.measured() if f.reading else "-", f.verdict)
        for f in findings
    ]
    table(COLUMNS, rows, [STYLE[f.verdict] for f in findings])
    print(summary(findings))
    for name, commands in _commands(findings):
        print(f"next: {commands}  # {name}")


def summary(findings: Sequence[Finding]) -> str:
    counted = Counter(finding.verdict for finding in findings)
    return f"{len(findings)} claims: " + ", ".join(f"{counted[word]} {word}" for word in STYLE)


def markdown(findings: Sequence[Finding], stored: Mapping[str, Mapping[str, Baseline]]) -> list[str]:
    """The page ``docs/claims.md``: the rule, a table for each source, and the cases that are still to be measured."""
    lines = [
        "# What people say about FP8 training, and what was measured here",
        "",
        f"Made by `python -m benchmarks.claims --markdown` from stored figures of {' and '.join(stored)}, not written",
        f"by hand: those of the suite's cases, and those of cases that no gate asks (`{MEASURED}/`).",
        "A claim about one of these GPUs is held against its figures where the case was measured there.",
        f"Measured {measured_when(findings, stored)}.",
        f"{summary(findings)}.",
        "",
        RULE,
    ]
    for source in dict.fromkeys(finding.claim.source for finding in findings):
        name = f"[{source.name}]({source.url})" if source.url else source.name[0].upper() + source.name[1:]
        lines += ["", f"## {name} ({source.kind})", "", *HEAD]
        lines += [_row(finding) for finding in findings if finding.claim.source == source]
    wanted = list(_commands(findings))
    if wanted:
        lines += ["", "## Not measured yet", "", "| claims | what measures them |", "|---|---|"]
        lines += [f"| {name} | `{command}` |" for name, command in wanted]
    return lines


def measured_when(findings: Iterable[Finding], stored: Mapping[str, Mapping[str, Baseline]]) -> str:
    """The days on which the cases behind these findings were last measured, by the libraries that they ran."""
    days: dict[str, set[str]] = {}
    for finding in findings:
        for case in (finding.near.case, finding.near.other) if finding.reading else ():
            if case is not None:
                newest = stored[finding.gpu][case.id].newest
                days.setdefault(libraries_of(newest), set()).add(newest.date)
    spans = {libraries: " to ".join(dict.fromkeys((min(on), max(on)))) for libraries, on in days.items()}
    return "; ".join(f"on {span} with {libraries}" for libraries, span in spans.items()) or "nothing yet"


def _row(finding: Finding) -> str:
    claim = finding.claim
    what = METRIC_NAMES[claim.metric]
    return f"| {claim.says} | {what}: {claim.figure} | {finding.measured()} | {finding.verdict} | {_with(finding)} |"


def _with(finding: Finding) -> str:
    near = finding.near
    names = f"`{near.case.id}`" + (f" against `{near.other.id}`" if near.other else "")
    text = "; ".join([names, *(f"{name}: {what}" for name, what in finding.differs.items())])
    if finding.reading is None and LEARNS_TOO_LITTLE in finding.why:
        return f"{text} ({LEARNS_TOO_LITTLE})"
    nearer = finding.why if finding.reading else ()
    return text + (f" (nearer, but {'; '.join(nearer)})" if nearer else "")


def _cases(finding: Finding) -> str:
    near = finding.near
    return near.case.id + (f" / {near.other.id}" if near.other else "")


def _commands(findings: Iterable[Finding]) -> Iterable[tuple[str, str]]:
    """(claims, command) for each case that is missing; one command for all claims that wait for it."""
    waiting: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.verdict == NOT_MEASURED and LEARNS_TOO_LITTLE not in finding.why:
            waiting.setdefault(_cases(finding), []).append(finding)
    for group in waiting.values():
        yield ", ".join(finding.claim.id for finding in group), group[0].command()


def to_json(finding: Finding) -> dict[str, Any]:
    claim, near, reading = finding.claim, finding.near, finding.reading
    return {
        "id": claim.id,
        "says": claim.says,
        "source": vars(claim.source),
        "metric": claim.metric,
        "unit": METRICS[claim.metric],
        "compare": claim.compare,
        "claimed": [claim.low, claim.high],
        "case": near.case.id,
        "other": near.other.id if near.other else None,
        "differs": finding.differs,
        "measured": vars(reading) if reading else None,
        "verdict": finding.verdict,
        "missing": list(finding.why),
        "command": None if reading else finding.command(),
    }
