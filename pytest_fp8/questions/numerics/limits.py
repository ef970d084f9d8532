"""The limits of the numerics question, from the spread that healthy arms showed. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pytest_fp8.recipes import library_of

HIGH_PRECISION_DB = 40.0
"""SQNR above which more says nothing: a BF16 product has 53 to 56 dB, an FP8 one 20 to 35."""
PLAIN_DB = 35.0
"""SQNR from which a layer of the reference counts as a product of its input and weight, and nothing else."""
LEAST_VALUES = 64
"""Values below which a parameter is not judged by itself: of a scalar's gradient, one draw says nothing of its
spread."""
UNDECIDED = 0.8
"""A relative difference at which a gradient of zeros would nearly pass. Where the limit is as large, the gain is
judged. Where moved weights change the gradient by as much, it is not judged."""
GAIN_OF_MOVED = 1.0
"""A sensitive gradient's gain may differ from 1 by this multiple of the difference that moved weights make."""


@dataclass(frozen=True)
class Limits:
    """What a sound product or gradient stays within."""

    sqnr_db: float
    """A product's SQNR below what the recipe's own casts give on the same operands."""
    gain: float
    """The product's gain against theirs, as a fraction."""
    gradients: float
    """A gradient's relative difference to BF16's, as a multiple of the difference that moved weights make; and its
    gain's difference to 1, where only the gain is judged and weights were moved in several ways."""

    def sqnr_within(self, values: int) -> float:
        """With few values the noise power is itself uncertain: three standard errors, 3 * 10/ln(10) * sqrt(2/n) dB."""
        return float(self.sqnr_db + 18.4 / max(values, 1) ** 0.5)


LEAST = Limits(sqnr_db=1.0, gain=0.01, gradients=3.0)
"""Limits are never narrower: another chip's and another release's kernels round in another order."""
UNMEASURED = Limits(sqnr_db=3.0, gain=0.02, gradients=4.0)
"""Of recipes without healthy arms in :func:`healthy_spread`. An e5m2 operand in place of an e4m3 one costs 4.5 dB."""
LATER_DELAYED = Limits(sqnr_db=12.0, gain=0.1, gradients=4.0)
"""Of products by scales of past steps: those of delayed scaling in a later step, and of a layer with scales of its
own in any step. About twice what is allowed where its scales have seen the batch."""
ALLOWANCE = 2.0
"""Limits are this many times the largest value that any healthy sample showed."""


@cache
def healthy_spread() -> dict[str, dict[str, float]]:
    """Library and recipe -> the largest value of each limit's quantity in healthy arms, and the number of samples.
    Written by ``python -m benchmarks.numerics table``, never by hand."""
    found: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("spread.json").read_text())
    return found


def limits_of(backend: str, recipe: str) -> Limits:
    """The recipe's limits. Each value is the larger of :data:`LEAST` and twice the largest in healthy arms."""
    seen = healthy_spread().get(f"{library_of(backend)} {recipe}")
    if seen is None:
        return UNMEASURED
    return Limits(
        sqnr_db=max(LEAST.sqnr_db, ALLOWANCE * seen["sqnr_db"]),
        gain=max(LEAST.gain, ALLOWANCE * seen["gain"]),
        gradients=max(LEAST.gradients, ALLOWANCE * seen["gradients"]),
    )


def later_limits_of(backend: str, recipe: str) -> Limits:
    """Of products after training steps. Every recipe but delayed scaling takes its scales from the tensors that are
    multiplied, so that its products are as right in any step (111 sound workloads: 0.25 dB, 0.1 %)."""
    return LATER_DELAYED if recipe == "delayed" else limits_of(backend, recipe)
