"""One claim about FP8 training: a figure or a range, who says so, and the cases that can test it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_fp8.case import Case
from pytest_fp8.codes import R
from pytest_fp8.errors import refuse

AT_LEAST, AT_MOST, ABOUT = "at least", "at most", "about"

METRICS = {
    "speedup": "x",
    "memory_ratio": "x",
    "activation_ratio": "x",
    "loss_gap": "nats",
    "fp8_layers": "layers",
    "fp8_tokens_per_s": "tokens/s",
    "bf16_tokens_per_s": "tokens/s",
    "speedup_over_other": "x",
    "step_over_other_bf16": "x",
    "step_over_other_fp8": "x",
    "adapter_share": "of the BF16 step",
}
"""What a claim can be about -> its unit. The last four compare two cases: the claim's own and its ``other``."""
OF_TWO_CASES = ("speedup_over_other", "step_over_other_bf16", "step_over_other_fp8", "adapter_share")
DIFFERENCES = (
    "GPU",
    "number of GPUs",
    "parallelism",
    "model",
    "layers",
    "adapters",
    "batch",
    "recipe",
    "settings",
    "library",
    "framework",
    "reference",
    "method",
)
"""In what a claim's configuration can differ from the measured one. The first two come from the claim's source."""


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
    """One of :data:`DIFFERENCES` -> what it is here. Empty where only the GPU and the number of GPUs can differ, which
    the claim's source names."""
    other: Case | None = None
    """The second case of a metric that compares two."""


@dataclass(frozen=True)
class Claim:
    """``says`` is the claim in this project's words. ``cases`` are the nearest first: the first that has a stored
    baseline answers. Raises :class:`SettingsError` for a claim that no baseline could ever answer."""

    id: str
    says: str
    metric: str
    compare: str
    """``at least`` and ``at most`` are promises, which more than promised keeps; ``about`` is an observation."""
    low: float
    high: float
    source: Source
    cases: tuple[Near, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            refuse(R.BAD_VALUE, f"metric of claim {self.id!r}", expected=", ".join(METRICS), seen=self.metric)
        if self.compare not in (AT_LEAST, AT_MOST, ABOUT):
            refuse(
                R.BAD_VALUE,
                f"comparison of claim {self.id!r}",
                expected="at least, at most or about",
                seen=self.compare,
            )
        if self.low > self.high or not self.cases:
            refuse(
                R.BAD_VALUE, f"claim {self.id!r}", expected="low <= high, and a case", seen=f"{self.low}, {self.high}"
            )
        if any((near.other is None) == (self.metric in OF_TWO_CASES) for near in self.cases):
            refuse(
                R.BAD_VALUE,
                f"claim {self.id!r}",
                expected="a second case where the metric compares two",
                seen=self.metric,
            )
        unknown = {name for near in self.cases for name in near.differs} - set(DIFFERENCES[2:])
        if unknown:
            refuse(
                R.BAD_VALUE, f"claim {self.id!r}", expected=", ".join(DIFFERENCES[2:]), seen=", ".join(sorted(unknown))
            )

    @property
    def figure(self) -> str:
        """The claimed range as people write it."""
        low, high = shown(self.metric, self.low), shown(self.metric, self.high)
        if self.low == self.high:
            return f"{self.compare} {low}"
        return f"about {low} to {high}" if self.compare == ABOUT else f"{low} to {high}"


def shown(metric: str, value: float) -> str:
    """A value with its unit: ``1.149x``, ``+0.0031 nats``, ``850k tokens/s``, ``40%``."""
    unit = METRICS[metric]
    if unit == "tokens/s":
        return f"{value / 1000:.0f}k tokens/s"
    if unit == "nats":
        return f"{value:+.4f} nats"
    if unit == "x":
        return f"{value:.3f}x"
    if metric == "adapter_share":
        return f"{value:.0%}"
    return f"{value:g}"
