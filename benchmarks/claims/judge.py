"""What the stored baselines say about a claim. Pure.

The rule. A measurement is an interval that includes what sessions on other machines differ by. A claim is a range. A
ratio's and a rate's is widened by :data:`TOLERANCE` of its ends; a gap in nats and a count, which may be near zero, are
taken as they are said. A single figure promised with ``at least`` is kept by everything above it, one with ``at most``
by everything below it; a range is kept by what lies within it: 1.7x to 2.2x by 1.7x, and not by 3x.

The claim *held* where the whole interval lies inside that, and held *partly* where it reaches across an end, which an
interval too wide to tell does, too. Where all of the interval lies outside, the claim *did not hold* if the same
configuration was measured, and was *not reproduced here* if something differs.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from pytest_fp8.baselines.record import Baseline
from pytest_fp8.case import Case
from pytest_fp8.stats.components import MEASURED, Components, Session
from pytest_fp8.stats.estimate import Estimate, estimate_of, spread

CLAIMS = Path(__file__).with_name("claims.toml")
AT_LEAST, AT_MOST, ABOUT = "at_least", "at_most", "about"
METRICS = {
    "speedup": ("speed over BF16", "x"),
    "memory_ratio": ("peak memory over BF16", "x"),
    "activation_ratio": ("activations over BF16", "x"),
    "loss_gap": ("loss above BF16", "nats"),
    "fp8_layers": ("FP8 layers", "layers"),
    "fp8_tokens_per_s": ("FP8", "tokens/s"),
    "bf16_tokens_per_s": ("BF16", "tokens/s"),
    "speedup_over_other": ("speed over the other case", "x"),
    "step_over_other_bf16": ("step over the other's BF16 step", "x"),
    "step_over_other_fp8": ("step over the other's FP8 step", "x"),
    "adapter_share": ("adapters' share of the BF16 step", "of the BF16 step"),
}
"""What a claim can be about -> its name and unit. The last four compare the claim's own case and its ``other``."""
TOLERANCE = 0.02
"""Of a claimed figure, at each end: figures are quoted with two digits, and 2 % is what a case of this suite allows."""
ABSOLUTE = ("nats", "layers")
"""Units of figures near zero: a share of them would say nothing."""
BETWEEN_HOSTS = 0.05
"""How far step times of the same arm lay apart on hosts of one kind of GPU. It widens what is no ratio of two arms that
took turns on one GPU: tokens per second, and step times of two different cases."""
WORKS = "of the GPU's work, since the arms' steps wait for their host"
LEARNS_TOO_LITTLE = "in the steps of a test 8B moves too few weights for a loss to say anything"
"""docs/findings.md has the measurement."""
HELD, PARTLY, DID_NOT_HOLD = "held", "partly", "did not hold"
NOT_REPRODUCED, NOT_MEASURED = "not reproduced here", "not measured here"


@dataclass(frozen=True)
class Source:
    """Who says so: published, with an address, or a user's report, by the kind of document it stood in."""

    name: str
    url: str = ""
    kind: str = "user report"
    gpu: str = ""
    """The GPU it was measured on, by the name of its baselines (``h100``). Empty where that is not known."""
    gpus: int = 1
    """How many of them; 1 where the source names no number."""


@dataclass(frozen=True)
class Near:
    """A case that can test a claim, and in what its configuration differs from the one the claim is about."""

    case: Case
    differs: Mapping[str, str] = field(default_factory=dict)
    other: Case | None = None


@dataclass(frozen=True)
class Claim:
    """``says`` is the claim in this project's words. ``cases``: the first that has a stored baseline answers."""

    says: str
    metric: str
    compare: str
    low: float
    high: float
    source: Source
    cases: tuple[Near, ...]

    @property
    def figure(self) -> str:
        """The claimed range as people write it."""
        low, high = shown(self.metric, self.low), shown(self.metric, self.high)
        if self.low == self.high:
            return f"{self.compare.replace('_', ' ')} {low}"
        return f"about {low} to {high}" if self.compare == ABOUT else f"{low} to {high}"


def claims(cases: Mapping[str, Case]) -> dict[str, Claim]:
    """The claims of claims.toml by id. ``cases``: every case of the suite and of this folder, by id."""
    stated = tomllib.loads(CLAIMS.read_text())
    sources = {key: Source(**fields) for key, fields in stated["source"].items()}
    found = {}
    for name, fields in stated["claim"].items():
        (compare,) = {AT_LEAST, AT_MOST, ABOUT} & fields.keys()
        figures = fields[compare] if isinstance(fields[compare], list) else [fields[compare]]
        near = [
            Near(cases[each["case"]], each.get("differs", {}), cases[each["other"]] if "other" in each else None)
            for each in fields["cases"]
        ]
        metric, source = fields.get("metric", "speedup"), sources[fields["source"]]
        found[name] = Claim(fields["says"], metric, compare, figures[0], figures[-1], source, tuple(near))
    return found


def shown(metric: str, value: float) -> str:
    """A value with its unit: ``1.149x``, ``+0.0031 nats``, ``850k tokens/s``, ``40%``."""
    unit = METRICS[metric][1]
    if unit == "tokens/s":
        return f"{value / 1000:.0f}k tokens/s"
    if unit == "nats":
        return f"{value:+.4f} nats"
    if unit == "x":
        return f"{value:.3f}x"
    if metric == "adapter_share":
        return f"{value:.0%}"
    return f"{value:g}"


@dataclass(frozen=True)
class Reading:
    """A measured value and the interval that it may lie in."""

    value: float
    low: float
    high: float
    busy: bool = False
    """Whether it is of the time in which the GPU works, since the arms' steps wait for their host."""


@dataclass(frozen=True)
class Finding:
    """A claim, the case that answered it, and the verdict. ``why``: why no nearer case could answer."""

    claim: Claim
    near: Near
    gpu: str
    """Whose baselines answer it, or should."""
    verdict: str
    reading: Reading | None = None
    why: tuple[str, ...] = ()

    @property
    def differs(self) -> dict[str, str]:
        """In what the measured configuration differs from the claim's: by name, and ``time``."""
        waits = {"time": WORKS} if self.reading is not None and self.reading.busy else {}
        return {**differences(self.claim, self.near, self.gpu), **waits}

    def measured(self) -> str:
        """The value with its interval; ``-`` without one."""
        if self.reading is None:
            return "-"
        low, high = (shown(self.claim.metric, end) for end in (self.reading.low, self.reading.high))
        value = shown(self.claim.metric, self.reading.value)
        return value if low == high else f"{value} [{low}, {high}]"


def judge(claim: Claim, stored: Mapping[str, Mapping[str, Baseline]]) -> Finding:
    """``stored``: GPU -> its baselines by case id. The nearest case that can answer does, on the claim's GPU where it
    was measured there, else on the first."""
    missing: list[str] = []
    gpus = sorted(stored, key=lambda gpu: gpu != claim.source.gpu)
    for near in claim.cases:
        whys = []
        for gpu in gpus:
            why = _says_nothing(claim, near) or _missing(near, stored[gpu])
            reading = None if why else read(claim.metric, near, stored[gpu])
            if reading is not None:
                same = not differences(claim, near, gpu) and not reading.busy
                given = verdict(claim, reading, same)
                return Finding(claim, near, gpu, given, reading, tuple(missing))
            whys.append(why or f"{near.case.id} has no {claim.metric}")
        missing += dict.fromkeys(whys)
    return Finding(claim, claim.cases[0], gpus[0], NOT_MEASURED, why=tuple(missing))


def differences(claim: Claim, near: Near, gpu: str) -> dict[str, str]:
    """In what this case on ``gpu`` differs from what the claim is about: the name of the difference -> what it is."""
    source, found = claim.source, {}
    if source.gpu != gpu:
        claimed = f" instead of {source.gpu.upper()}" if source.gpu else ", the claim's is not known"
        found["GPU"] = gpu.upper() + claimed
    if source.gpus != near.case.gpus:
        found["number of GPUs"] = f"{near.case.gpus} instead of {source.gpus}"
    return {**found, **near.differs}


def verdict(claim: Claim, reading: Reading, same: bool) -> str:
    """The rule, on one interval. ``same``: whether the configuration measured is the one that the claim is about."""
    widened = TOLERANCE if METRICS[claim.metric][1] not in ABSOLUTE else 0.0
    a_range = claim.low < claim.high
    low = claim.low - widened * abs(claim.low) if a_range or claim.compare != AT_MOST else -math.inf
    high = claim.high + widened * abs(claim.high) if a_range or claim.compare != AT_LEAST else math.inf
    if low <= reading.low and reading.high <= high:
        return HELD
    if low <= reading.high and reading.low <= high:
        return PARTLY
    return DID_NOT_HOLD if same else NOT_REPRODUCED


def read(metric: str, near: Near, stored: Mapping[str, Baseline]) -> Reading | None:
    """A metric of a case, or of two cases, with its interval; ``None`` where the baseline does not hold it."""
    own = stored[near.case.id]
    if near.other is not None:
        return _of_two(metric, own, stored[near.other.id])
    if metric == "speedup":
        gated = own.gated or metric
        found = own.values(gated)
        return replace(_ratio(elsewhere(found, MEASURED.of(gated))), busy=gated != metric) if found else None
    if metric in ("fp8_tokens_per_s", "bf16_tokens_per_s"):
        tokens = near.case.tokens
        times = own.values(metric.removesuffix("_tokens_per_s") + "_ms")
        return _between_hosts([math.prod(tokens) / (ms / 1000) for ms in times]) if tokens and times else None
    values = own.values(metric)
    if not values:
        return None
    if metric == "loss_gap":
        return _mean(values)
    # Bytes and counts repeat exactly: the values are the interval.
    return Reading(fmean(values), min(values), max(values))


def _of_two(metric: str, own: Baseline, other: Baseline) -> Reading | None:
    if metric in ("step_over_other_bf16", "step_over_other_fp8"):
        mine, theirs = own.values("fp8_ms"), other.values(metric.removeprefix("step_over_other_") + "_ms")
        return _between_hosts([fmean(mine) / fmean(theirs)]) if mine and theirs else None
    if not own.values("speedup") or not other.values("speedup"):
        return None
    first, second = elsewhere(own.values("speedup")), elsewhere(other.values("speedup"))
    if metric == "speedup_over_other":
        error, freedom = math.hypot(first.error, second.error), min(first.freedom, second.freedom)
        return _ratio(Estimate(first.theta - second.theta, error, freedom))
    return _adapter_share(first, second)


def _adapter_share(adapted: Estimate, full: Estimate) -> Reading | None:
    """The adapters' share of the BF16 step, computed as the claim's source computes it.

    FP8 gains G on everything but the adapters and nothing on those: 1 / S = (1 - share) / G + share. G is the speedup
    of full training, S that with adapters. An upper bound: full training also gains on the weight gradients, which a
    frozen base does not have. ``None`` where full training gains nothing: the equation has no solution then.
    """
    if full.interval[0] <= 1:
        return None

    def share(with_adapters: float, without: float) -> float:
        return (1 / with_adapters - 1 / without) / (1 - 1 / without)

    low = share(adapted.interval[1], full.interval[0])
    high = share(adapted.interval[0], full.interval[1])
    return Reading(share(adapted.ratio, full.ratio), min(low, high), max(low, high))


def _says_nothing(claim: Claim, near: Near) -> str:
    """Why no figure of this case could answer; empty where one can."""
    return LEARNS_TOO_LITTLE if claim.metric == "loss_gap" and near.case.model == "8b" else ""


def _missing(near: Near, stored: Mapping[str, Baseline]) -> str:
    for case in (near.case, near.other):
        if case is None:
            continue
        found = stored.get(case.id)
        if found is None:
            return f"no baseline of {case.id}"
        if found.case_hash != case.digest():
            return f"the baseline of {case.id} is of another definition"
    return ""


def elsewhere(session: Session, components: Components = MEASURED) -> Estimate:
    """One session's log ratio with its error as a figure for other sessions, too."""
    here, found = estimate_of(session, (), components), spread(session, (), components)
    freedom = found.freedom(found.session, here.error**2)
    return replace(here, error=math.hypot(here.error, components.session), freedom=freedom)


def _ratio(speed: Estimate) -> Reading:
    return Reading(speed.ratio, *speed.interval)


def _between_hosts(values: list[float]) -> Reading:
    return Reading(fmean(values), min(values) * (1 - BETWEEN_HOSTS), max(values) * (1 + BETWEEN_HOSTS))


def _mean(values: list[float]) -> Reading:
    """The mean over seeds with the confidence that the loss question uses, on both sides."""
    from pytest_fp8.stats.loss import LOSS_CONFIDENCE
    from pytest_fp8.stats.quantiles import sample_sd, student_quantile

    count, middle = len(values), fmean(values)
    if count < 2:
        return Reading(middle, -math.inf, math.inf)
    half = student_quantile(LOSS_CONFIDENCE, count - 1) * sample_sd(values) / math.sqrt(count)
    return Reading(middle, middle - half, middle + half)
