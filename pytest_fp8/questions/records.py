"""Evidence as plain data: what the arms said, ready for a check and writable by hand in a test. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.questions.kernels import kernel_family
from pytest_fp8.questions.products import (
    FP8,
    LayerCall,
    Product,
    StepProducts,
    attribute,
    products_from_json,
)
from pytest_fp8.recipes import ROLES, Role


@dataclass(frozen=True)
class LayersEvidence:
    """What was converted, which recipe was in force, and what one training step executed."""

    originals: Mapping[str, tuple[int, int]]
    """Every nn.Linear of the unconverted model: name -> (in_features, out_features)."""
    converted: Sequence[str]
    skipped: Mapping[str, str]
    """Name -> why it was left in high precision."""
    live_fp8: Sequence[str]
    """Names whose live module is one of the backend's FP8 layers."""
    calls: Sequence[LayerCall]
    recipes: Mapping[str, Mapping[str, Any]]
    products: Sequence[Product]
    families: Mapping[str, Sequence[str]] | None = None
    """Kernel families learned to multiply FP8 and BF16; ``None`` where there are no kernels (a CPU)."""
    attention: Mapping[str, Sequence[str]] = field(default_factory=dict)
    recompute: bool = False
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    """GPU time of one step: ``fp8 products``, ``other products``, ``attention``, ``rest``, and ``busy`` in all."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Name -> module and class of the live module."""
    in_eval: Sequence[str] = ()
    """Converted layers that are in eval mode although the model trains."""
    agreement: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """FP8 layer -> (gain, SQNR in dB) of its output against the same product in high precision."""
    frozen_history: Sequence[str] = ()
    """FP8 layers whose amax history a training step left as it was."""
    bypassed: Sequence[str] = ()
    """Converted layers that were never called, though their weights got gradients."""
    unfrozen: Sequence[str] = ()
    """Weights that were frozen before the conversion and take gradients after it."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Converted layer -> what it did besides its product before the conversion: a hook, its class's own forward."""
    stacked: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Parameters that stack the weights of several products, which no conversion of Linears reaches: name -> shape."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Precision that was asked for from outside: ``asked`` by the environment, ``accelerate`` what Accelerate uses."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any], recompute: bool = False) -> LayersEvidence:
        return cls(
            originals={name: (sizes[0], sizes[1]) for name, sizes in data["originals"].items()},
            converted=data["converted"],
            skipped=data["skipped"],
            live_fp8=data["live_fp8"],
            calls=[LayerCall(**call) for call in data["calls"]],
            recipes=data["recipes"],
            products=products_from_json(data["products"]),
            families=data["families"],
            attention=data["attention"],
            recompute=recompute,
            milliseconds=data.get("milliseconds", {}),
            kinds=data.get("kinds", {}),
            in_eval=data.get("in_eval", ()),
            agreement=data.get("agreement", {}),
            frozen_history=data.get("frozen_history", ()),
            bypassed=data.get("bypassed", ()),
            unfrozen=data.get("unfrozen", ()),
            lost=data.get("lost", {}),
            stacked=data.get("stacked", {}),
            switches=data.get("switches", {}),
        )

    def verified(self) -> list[Product]:
        """The products, each FP8 one checked against the kernel that ran it.

        An operator that was given FP8 operands but launched a BF16 kernel counts as BF16; one whose kernel's family was
        never learned counts as ``unknown kernel``.
        """
        if self.families is None:
            return list(self.products)
        fp8, bf16 = set(self.families[FP8]), set(self.families["bfloat16"])
        checked = []
        for product in self.products:
            family = kernel_family(product.kernel)
            kind = product.kind
            if kind == FP8 and family not in fp8:
                kind = "bfloat16 kernel" if family in bf16 else "unknown kernel"
            checked.append(
                Product(
                    product.phase, product.inner, product.outer, kind, product.operator, product.kernel, product.batch
                )
            )
        return checked

    def step(self, fp8_roles: Collection[Role] = ROLES) -> StepProducts:
        """The products by layer and role; ``fp8_roles``: those that the recipe runs in FP8."""
        return attribute(self.verified(), self.calls, self.recompute, fp8_roles)


@dataclass(frozen=True)
class Curve:
    """Losses (nats) and gradient norms of one training run, step by step."""

    seed: int
    losses: Sequence[float]
    gradient_norms: Sequence[float]
    data: int = 0
    """Checksum of the batches of all steps."""
    trained: Sequence[str] | None = None
    """Parameters that the arm's optimizer steps, by plain name; ``None`` where the arm did not say."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Curve:
        return cls(data["seed"], data["losses"], data["gradient_norms"], data.get("data", 0), data.get("trained"))


@dataclass(frozen=True)
class LossEvidence:
    """Curves of the FP8 arm, of the reference, and of the reference nudged by one rounding (``twin``), by seed."""

    fp8: Mapping[int, Curve]
    bf16: Mapping[int, Curve]
    twin: Mapping[int, Curve]


@dataclass(frozen=True)
class TimingEvidence:
    """Milliseconds per step in the order taken; one entry of each list per fresh process."""

    bf16: Sequence[Sequence[float]]
    fp8: Sequence[Sequence[float]]
    throttles: Sequence[str] = ()
    strangers: Sequence[int] = ()
    clocks: Sequence[int] = ()
    bf16_attention: Mapping[str, Sequence[str]] = field(default_factory=dict)
    fp8_attention: Mapping[str, Sequence[str]] = field(default_factory=dict)
    bf16_cudnn: int | None = None
    fp8_cudnn: int | None = None
    fp8_compiled: bool | None = None
    """Whether the FP8 arm was compiled; ``None`` where it did not say."""
    bf16_gpu: Mapping[str, float] = field(default_factory=dict)
    fp8_gpu: Mapping[str, float] = field(default_factory=dict)
    """GPU milliseconds of one profiled step by kind of kernel: :attr:`LayersEvidence.milliseconds`."""


@dataclass(frozen=True)
class MemoryEvidence:
    """Bytes: peaks of one training step per phase, and what stays resident between steps."""

    bf16: Mapping[str, Any]
    fp8: Mapping[str, Any]

    def activations(self) -> dict[str, int]:
        """What the forward pass holds at its peak on top of what is resident: saved activations, logits, and whatever
        FP8 copies a library keeps for the backward pass. By arm; empty where a step of the user's own has no such
        phase in one of them."""
        arms = {"bf16": self.bf16, "fp8": self.fp8}
        held = {
            name: arm["phases"]["forward"]["allocated"] - arm["resident"]
            for name, arm in arms.items()
            if "forward" in arm["phases"]
        }
        return held if len(held) == len(arms) and held["bf16"] > 0 else {}


@dataclass(frozen=True)
class Transfer:
    """One checkpoint carried from a source arm to a target arm through one store."""

    direction: str
    """``fp8 -> bf16`` or ``bf16 -> fp8``."""
    store: str
    saved: Mapping[str, Any]
    loaded: Mapping[str, Any]
    logit_distance: float
    """Relative L2 distance of the target's logits after loading from the source's."""
    logit_limit: float
    with_optimizer: bool = False
    source_losses: Sequence[float] = ()
    resumed_losses: Sequence[float] = ()
