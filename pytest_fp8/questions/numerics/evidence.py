"""What an arm says of the products of one step and of the gradients they led to; and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_fp8.recipes import Role

BUCKETS = 1024
"""Numbers that stand for one parameter's gradient: they give the size of a difference to about 2 %."""
LATER = 13
"""Training steps before products are looked at again: a prime, fewer than any loss curve has (docs/limits.md)."""


@dataclass(frozen=True)
class ProductCheck:
    """A sample of one executed product, against the exact product of its own operands."""

    layer: str
    role: Role
    values: int
    """How many of the product's values were compared."""
    power: float
    """Sum of squares of the exact values; 0 where there is nothing to compare with."""
    gain: float
    """Least-squares factor between the values and the exact ones: 1 for right scales."""
    sqnr: float
    """``10 log10(|exact|^2 / |exact - seen|^2)`` in dB, at most 100."""
    own_gain: float
    """The gain that the recipe's own casts give on these operands."""
    own_sqnr: float
    """The SQNR that they give."""
    gain_error: float
    """Standard error of the gain: large where few large values carry the power."""
    lost: float
    """Share of values that are zero and should not be."""
    underflow: float
    """Share of nonzero operand values that the recipe's own cast makes zero: the larger of both operands'."""
    of_bias: float = 0.0
    """Share of the error's power that is the layer's bias, missing or added twice."""
    own_scales: bool = False
    """Whether the layer keeps numbers beside its weight and bias that this step changed, as scales of past steps are,
    and the casts it is compared with do not know them."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of one step from the weights of seed 0, as :data:`BUCKETS` numbers for each parameter."""

    sketches: Mapping[str, str]
    """Parameter, by the plain model's name -> float32 numbers in base64. In the order in which the gradients
    were done: backward through the model."""
    silent: Sequence[str]
    """Trained parameters that got no gradient."""
    loss: float
    """Of the step."""
    data: int
    """Fingerprint of the batch."""
    random: str = ""
    """Digest of the random generators' state after the step."""
    apart: str = ""
    """Where the ranks have gradients of their own at the end of the backward pass, and the sketches are their mean: the
    first that differs."""


@dataclass(frozen=True)
class HandedOn:
    """A layer's weight gradient as ``optimizer.step()`` finds it, beside the sum of what its products gave."""

    layer: str
    cosine: float
    """Between the two."""
    factor: float
    """Least-squares factor between them: that of clipping, of a loss scale."""
    length: float
    """Of the sum, in the lines that are compared."""


@dataclass(frozen=True)
class ArmNumerics:
    """One arm's answer to ``numerics``."""

    products: Sequence[ProductCheck]
    """Of its FP8 layers; of all Linears in the reference."""
    gradients: Gradients
    moved: Gradients | None
    """With its Linears' weights moved at random by as much as FP8 moves products. Asked of the reference alone."""
    later: Sequence[ProductCheck]
    """As ``products``, after :data:`LATER` training steps as the arm runs them."""
    evaluated: Sequence[ProductCheck] = ()
    """Forward products of an evaluation with the first weights; empty where the model cannot be evaluated alone."""
    evaluated_later: Sequence[ProductCheck] = ()
    """The same after :data:`LATER` training steps."""
    evaluation_error: str = ""
    """What the model raised in the first of the two; empty where it did not."""
    handed_on: Sequence[HandedOn] = ()
    """Of the step with ``products``, for each call of ``optimizer.step()``; empty on several GPUs, and where gradients
    never meet an optimizer."""
    handed_on_later: Sequence[HandedOn] = ()
    """Of the step with ``later``."""


@dataclass(frozen=True)
class NumericsEvidence:
    """Both arms' steps."""

    fp8: ArmNumerics
    bf16: ArmNumerics
    further: Sequence[Gradients] = ()
    """The reference's gradients with its weights moved in further ways; asked where one way is not enough."""

    @property
    def moved(self) -> Sequence[Gradients]:
        """How far gradients may move, in this model and on this batch."""
        return [self.bf16.moved or self.bf16.gradients, *self.further]
