"""What people say about FP8 training, held against stored baselines: the page docs/claims.md.

    python -m benchmarks.claims > docs/claims.md

Instant: it reads baselines, and measures nothing. A claim fails nothing. Loads no torch. :data:`RULE` is the rule.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.claims import cases
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.store import read_folder, readable
from pytest_fp8.case import Case
from pytest_fp8.report.baselines import libraries_of
from pytest_fp8.stats.components import MEASURED as COMPONENTS
from pytest_fp8.stats.estimate import Estimate, estimate_of, spread
from pytest_fp8.stats.loss import LOSS_CONFIDENCE
from pytest_fp8.stats.quantiles import sample_sd, student_quantile

CLAIMS = Path(__file__).with_name("claims.toml")
BASELINES, MEASURED = Path("baselines"), Path("benchmarks/claims/measured")
GPUS = ("h200", "h100")
TOLERANCE = 0.02
"""Of a claimed figure, at each end: figures are quoted with two digits, and 2 % is what a case of this suite allows."""
BETWEEN_HOSTS = 0.05
"""How far step times of the same arm lay apart on hosts of one kind of GPU. It widens what is no ratio of two arms that
took turns on one GPU: tokens per second."""
HELD, PARTLY, DID_NOT_HOLD = "held", "partly", "did not hold"
NOT_REPRODUCED, NOT_MEASURED = "not reproduced here", "not measured here"
WORDS = (HELD, DID_NOT_HOLD, NOT_REPRODUCED, PARTLY, NOT_MEASURED)
WORKS = "of the GPU's work, since the arms' steps wait for their host"
LEARNS_TOO_LITTLE = "in the steps of a test 8B moves too few weights for a loss to say anything"
"""docs/measurements.md has the measurement."""
RULE = f"""\
Each measurement is an interval: 99 % for a speedup, what sessions on other machines differ by included; 95 % on each
side over seeds for a loss gap; tokens per second are widened by {BETWEEN_HOSTS:.0%}, which hosts differ by. A claimed
ratio or rate is widened by {TOLERANCE:.0%} at each end, a gap in nats and a number of layers are not. `at least` one
figure is kept by all above it, `at most` one by all below it; `about` one is what somebody saw. A range is kept by what
lies within it.

A claim *held* where the whole interval lies inside, and held *partly* where it reaches across an end, or is too wide to
tell. Where all of it lies outside, the claim *did not hold* if the same configuration was measured here, and was *not
reproduced here* if the configuration differs: what somebody saw elsewhere may have been so there. The last column
names the case that was measured, and in what it differs from what the claim is about."""
HEAD = ("| claim | figure | measured | verdict | measured with, and what differs |", "|---|---|---|---|---|")


# -- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """A measured value and the interval that it may lie in."""

    value: float
    low: float
    high: float
    busy: bool = False
    """Whether it is of the time in which the GPU works, since the arms' steps wait for their host."""


METRICS: Mapping[str, tuple[str, str]] = {
    "speedup": ("speed over BF16", "{:.3f}x"),
    "memory_ratio": ("peak memory over BF16", "{:.3f}x"),
    "activation_ratio": ("activations over BF16", "{:.3f}x"),
    "loss_gap": ("loss above BF16", "{:+.4f} nats"),
    "fp8_layers": ("FP8 layers", "{:g}"),
    "fp8_tokens_per_s": ("FP8", "{:.0f}k tokens/s"),
    "bf16_tokens_per_s": ("BF16", "{:.0f}k tokens/s"),
}
"""What a claim can be about -> its name and how it is written."""
NEAR_ZERO = ("loss_gap", "fp8_layers")
"""A share of such a figure would say nothing."""


def shown(metric: str, value: float) -> str:
    """A value with its unit: ``1.149x``, ``+0.0031 nats``, ``850k tokens/s``, ``40%``."""
    return METRICS[metric][1].format(value / 1000 if metric.endswith("tokens_per_s") else value)


def elsewhere(stored: Baseline, metric: str) -> Estimate:
    """The newest session's log ratio with its error as a figure for other sessions, too."""
    run, components = stored.values(metric), COMPONENTS.of(metric)
    here, found = estimate_of(run, (), components), spread(run, (), components)
    freedom = found.freedom(found.session, here.error**2)
    return replace(here, error=math.hypot(here.error, components.session), freedom=freedom)


def read(metric: str, case: Case, stored: Baseline | None) -> Reading | str:
    """What the baseline of a case says, or why it cannot answer."""
    if metric == "loss_gap" and case.model == "8b":
        return LEARNS_TOO_LITTLE
    if stored is None:
        return f"no baseline of {case.id}"
    if stored.case_hash != case.digest():
        return f"the baseline of {case.id} is of another definition"
    arm, _, rate = metric.partition("_tokens")
    name = f"{arm}_ms" if rate else stored.gated if metric == "speedup" else metric
    values = stored.values(name) if name else []
    if not values:
        return f"{case.id} has no {metric}"
    if metric == "speedup":
        speed = elsewhere(stored, name)
        return Reading(speed.ratio, *speed.interval, busy=name == "busy_speedup")
    if rate and case.tokens:
        values = [math.prod(case.tokens) / (ms / 1000) for ms in values]
        return Reading(fmean(values), min(values) * (1 - BETWEEN_HOSTS), max(values) * (1 + BETWEEN_HOSTS))
    if metric != "loss_gap":
        return Reading(fmean(values), min(values), max(values))  # bytes and counts repeat exactly
    # The mean over seeds with the confidence that the loss question uses, on both sides.
    half = math.inf
    if len(values) > 1:
        half = student_quantile(LOSS_CONFIDENCE, len(values) - 1) * sample_sd(values) / math.sqrt(len(values))
    return Reading(fmean(values), fmean(values) - half, fmean(values) + half)


# -- what is claimed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """``says`` is the claim in this project's words. ``source``: of claims.toml, with ``name``; ``near``: the cases
    that can test it, the nearest first, with what differs from the configuration that it is about."""

    says: str
    source: Mapping[str, Any]
    near: Sequence[Mapping[str, Any]]
    metric: str = "speedup"
    at_least: float | Sequence[float] | None = None
    at_most: float | None = None
    about: float | Sequence[float] | None = None

    @property
    def ends(self) -> tuple[float, float]:
        figure = next(each for each in (self.at_least, self.at_most, self.about) if each is not None)
        return (figure[0], figure[-1]) if isinstance(figure, Sequence) else (figure, figure)

    @property
    def figure(self) -> str:
        """The claimed range as people write it."""
        low, high = (shown(self.metric, end) for end in self.ends)
        word = "at least" if self.at_least is not None else "at most" if self.at_most is not None else "about"
        if self.ends[0] == self.ends[1]:
            return f"{word} {low}"
        return f"about {low} to {high}" if word == "about" else f"{low} to {high}"

    def verdict(self, reading: Reading, same: bool) -> str:
        """The rule, on one interval. ``same``: whether the configuration measured is that of the claim."""
        low, high = self.ends
        widened = 0.0 if self.metric in NEAR_ZERO else TOLERANCE
        a_range = low < high
        low = -math.inf if not a_range and self.at_most is not None else low - widened * abs(low)
        high = math.inf if not a_range and self.at_least is not None else high + widened * abs(high)
        if low <= reading.low and reading.high <= high:
            return HELD
        if low <= reading.high and reading.low <= high:
            return PARTLY
        return DID_NOT_HOLD if same else NOT_REPRODUCED


def all_claims() -> list[Claim]:
    """Those of claims.toml."""
    stated = tomllib.loads(CLAIMS.read_text())
    return [
        Claim(source=stated["source"][each.pop("source")], near=each.pop("cases"), **each)
        for each in stated["claim"].values()
    ]


@dataclass(frozen=True)
class Finding:
    """A claim, the case that answered it, or should, and the verdict. ``why``: why no nearer case could answer."""

    claim: Claim
    near: Mapping[str, Any]
    gpu: str
    differs: Mapping[str, str]
    verdict: str = NOT_MEASURED
    reading: Reading | None = None
    why: tuple[str, ...] = ()

    def row(self) -> str:
        claim, measured = self.claim, "-"
        told = "; ".join([f"`{self.near['case']}`", *(f"{name}: {what}" for name, what in self.differs.items())])
        if self.reading is not None:
            value, low, high = (shown(claim.metric, getattr(self.reading, name)) for name in ("value", "low", "high"))
            measured = value if low == high else f"{value} [{low}, {high}]"
            told += f" (nearer, but {'; '.join(self.why)})" if self.why else ""
        elif LEARNS_TOO_LITTLE in self.why:
            told += f" ({LEARNS_TOO_LITTLE})"
        return f"| {claim.says} | {METRICS[claim.metric][0]}: {claim.figure} | {measured} | {self.verdict} | {told} |"


Stored = Mapping[str, Mapping[str, Baseline]]
"""GPU -> its baselines by case id."""


def judge(claim: Claim, stored: Stored, known: Mapping[str, Case]) -> Finding:
    """The nearest case that can answer does, on the claim's GPU where it was measured there, else on the first.
    ``known``: every case by id."""
    missing: list[str] = []
    gpus = sorted(stored, key=lambda gpu: gpu != claim.source.get("gpu"))
    for near in claim.near:
        case = known[near["case"]]
        found = {gpu: read(claim.metric, case, stored[gpu].get(case.id)) for gpu in gpus}
        for gpu, reading in found.items():
            if isinstance(reading, Reading):
                differs = differences(claim, near, case, gpu)
                verdict = claim.verdict(reading, not differs and not reading.busy)
                if reading.busy:
                    differs["time"] = WORKS
                return Finding(claim, near, gpu, differs, verdict, reading, tuple(missing))
        missing += dict.fromkeys(str(why) for why in found.values())
    near = claim.near[0]
    return Finding(claim, near, gpus[0], differences(claim, near, known[near["case"]], gpus[0]), why=tuple(missing))


def differences(claim: Claim, near: Mapping[str, Any], case: Case, gpu: str) -> dict[str, str]:
    """In what this case on ``gpu`` differs from what the claim is about: the name of the difference -> what it is."""
    named, gpus, found = claim.source.get("gpu", ""), claim.source.get("gpus", 1), {}
    if named != gpu:
        found["GPU"] = gpu.upper() + (f" instead of {named.upper()}" if named else ", the claim's is not known")
    if gpus != case.gpus:
        found["number of GPUs"] = f"{case.gpus} instead of {gpus}"
    return {**found, **near.get("differs", {})}


# -- the page ---------------------------------------------------------------------------------------------------------


def markdown(findings: Sequence[Finding], stored: Stored) -> list[str]:
    """The page ``docs/claims.md``: the rule, and a table for each source."""
    counted = Counter(finding.verdict for finding in findings)
    lines = [
        "# What people say about FP8 training, and what was measured here",
        "",
        f"Made by `python -m benchmarks.claims` from stored figures of {' and '.join(stored)}, not written",
        f"by hand: those of the suite's cases, and those of cases that no gate asks (`{MEASURED}/`).",
        "A claim about one of these GPUs is held against its figures where the case was measured there.",
        f"Measured {measured_when(findings, stored)}.",
        f"{len(findings)} claims: " + ", ".join(f"{counted[word]} {word}" for word in WORDS) + ".",
        "",
        RULE,
    ]
    for name in dict.fromkeys(finding.claim.source["name"] for finding in findings):
        of_it = [finding for finding in findings if finding.claim.source["name"] == name]
        source = of_it[0].claim.source
        title = f"[{name}]({source['url']})" if "url" in source else name[0].upper() + name[1:]
        lines += ["", f"## {title} ({source.get('kind', 'user report')})", "", *HEAD, *(each.row() for each in of_it)]
    return lines


def measured_when(findings: Sequence[Finding], stored: Stored) -> str:
    """The days on which the cases behind these findings were last measured, by the libraries that they ran."""
    days: dict[str, set[str]] = {}
    for finding in (each for each in findings if each.reading is not None):
        newest = stored[finding.gpu][finding.near["case"]].newest
        days.setdefault(libraries_of(newest), set()).add(newest.date)
    spans = {libraries: " to ".join(dict.fromkeys((min(on), max(on)))) for libraries, on in days.items()}
    return "; ".join(f"on {span} with {libraries}" for libraries, span in spans.items()) or "nothing yet"


def all_cases() -> dict[str, Case]:
    """Those of the suite and of this folder, by id."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "suites"))
    import matrix

    return {case.id: case for case in [*matrix.ALL, *cases.ALL]}


def main() -> None:
    every = {**readable(read_folder(MEASURED)), **readable(read_folder(BASELINES))}
    stored = {gpu: {case: each for (its, case), each in every.items() if its == gpu} for gpu in GPUS}
    known = all_cases()
    print("\n".join(markdown([judge(claim, stored, known) for claim in all_claims()], stored)))


if __name__ == "__main__":
    main()
