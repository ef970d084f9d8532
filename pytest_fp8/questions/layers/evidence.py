"""What an arm says of its conversion, the recipe in force and the products of one step; and how it is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_fp8.case import Case
from pytest_fp8.questions.layers.kernels import kernel_family, says_fp8
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product, StepProducts, profiled_step, recorded_step
from pytest_fp8.questions.ledger.evidence import OwnedProduct
from pytest_fp8.recipes import FPROP, RECOMPUTE, ROLES, Reason, Role, known_backend, recipe_facts


@dataclass(frozen=True)
class WireTime:
    """Collectives of one kind and type in one step of one rank."""

    operation: str
    """``all-gather``, ``reduce-scatter``, ``all-reduce``, ``broadcast``, ``all-to-all`` or ``other``."""
    dtype: str
    """As it travels; empty where the profile does not say."""
    count: int
    elements: int
    """Of the whole tensors that are gathered or reduced; 0 where the profile does not say."""
    bytes: int
    milliseconds: float
    """Of their kernels, which also run while they wait for other ranks."""


@dataclass(frozen=True)
class KernelTime:
    """All kernels of one name in one step."""

    name: str
    """Without template arguments' inner ones, parameters, and the number that torch's compiler gives."""
    count: int
    milliseconds: float


@dataclass(frozen=True)
class LayersEvidence:
    """What was converted, which recipe was in force, and what one training step executed.

    The field names are the keys of the arm's answer to ``layers``.
    """

    originals: Mapping[str, tuple[int, int]]
    """Every nn.Linear of the unconverted model: name -> (in_features, out_features)."""
    converted: Sequence[str]
    """Names that the conversion meant to put in FP8."""
    skipped: Mapping[str, Reason]
    """Name -> why it stays in high precision."""
    live_fp8: Sequence[str]
    """Names whose live module is one of the backend's FP8 layers."""
    calls: Sequence[LayerCall]
    """The calls of Linears in the recorded step that train, in order; and what multiplies in their place."""
    recipes: Mapping[str, Mapping[str, Any]]
    """FP8 layer -> the recipe and options in force, read inside its forward pass."""
    products: Sequence[Product]
    """The matrix products that one training step executed, in order."""
    families: Mapping[str, Sequence[str]] | None = None
    """Kernel families known to multiply ``fp8`` and ``bfloat16``; ``None`` on a CPU, which has no kernels."""
    attention: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Attention operator -> names of the kernels that it launched."""
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    """GPU time of one step: ``fp8 products``, ``other products``, ``attention``, ``optimizer`` (without its products),
    ``communication``, ``rest``, and ``busy`` in all. Empty on a CPU."""
    step_ms: Sequence[float] = ()
    """Milliseconds of each of several steps in a row, with the kernels alone profiled. Empty on a CPU."""
    busy_ms: Sequence[float] = ()
    """Milliseconds of each of these steps in which the GPU ran any kernel. Of several GPUs without what collectives
    wait for a late host: see ``arms.merging.steps_of_all``."""
    compute_ms: Sequence[float] = ()
    """Milliseconds of each of them in which it ran any kernel but collectives."""
    collectives: Sequence[Sequence[tuple[str, float]]] = ()
    """Of each of them, on one rank: kind of each collective, and milliseconds in which it ran and neither another
    kernel did nor a collective that had begun before it. Empty in what several ranks say together."""
    wire: Sequence[WireTime] = ()
    """What travelled between the ranks in the profiled step. Empty on one GPU and on a CPU."""
    rest: Sequence[KernelTime] = ()
    """What the time ``rest`` went into: the kernels that took most of it. Empty on a CPU."""
    exposed_ms: float = 0.0
    """Milliseconds of that step in which collectives ran and no other kernel did."""
    waits: Mapping[str, int] = field(default_factory=dict)
    """CUDA call by which the host waited for the GPU inside one step -> how often."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Name -> module path and class of the live module."""
    sharded: Sequence[str] = ()
    """Linears of whose weight each rank holds a shard."""
    in_eval: Sequence[str] = ()
    """Converted layers that are in eval mode although the model trains."""
    stale_amax: Sequence[str] = ()
    """FP8 layers whose amax history was not changed by a training step."""
    others: Sequence[Product] = ()
    """The Linears' products in the recorded step that no call needs: uncompiled, torchao computes the gradients of the
    first layer's input and of frozen weights, too."""
    routed: Sequence[str] = ()
    """Linears whose calls follow from numbers that the model computes: the profiled step may not call them. Empty on a
    CPU."""
    foreign: Sequence[OwnedProduct] = ()
    """Products of the uncompiled step that are no Linear's: convolutions, recurrent layers, raw parameters in high
    precision, batches of products in FP8."""
    dropped_behaviour: Mapping[str, str] = field(default_factory=dict)
    """Converted layer -> what it did besides its product before the conversion: a hook, its class's own forward."""
    unmatched: Sequence[str] = ()
    """Patterns of the workload's ``leave`` that match no Linear."""
    stacked_weights: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Parameters that hold the weights of several products and belong to no Linear: name -> shape."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """The mixed precision that ``asked`` (the environment) wants and that ``accelerate`` uses."""
    own_conversion: bool = False
    """Whether the workload's ``convert()`` put layers in FP8."""

    @property
    def in_fp8(self) -> set[str]:
        """FP8 layers: those of a class that says so, and whatever multiplies in FP8 in the forward pass."""
        return {*self.live_fp8, *(call.name for call in self.calls if call.fp8)}

    @property
    def of_own(self) -> set[str]:
        """Linears in FP8 by code of the user's own, known by their products."""
        return (self.in_fp8 - set(self.live_fp8)) & self.originals.keys()

    def recipe_of(self, case: Case, layer: str) -> str:
        """The recipe that a layer is held to: the case's, or another one of the library's where the workload converts
        and gives the case's to other layers."""
        return self.other_recipes(case).get(layer, case.recipe)

    def owes_fp8(self, case: Case, layer: str, role: Role) -> bool:
        """Whether an FP8 layer's product in this role is to run in FP8."""
        roles = recipe_facts(case.backend, self.recipe_of(case, layer)).roles
        return (FPROP if role == RECOMPUTE else role) in roles

    def other_recipes(self, case: Case) -> dict[str, str]:
        """Layer -> its recipe, of those that the workload's own conversion gives another recipe of the library, with
        its usual options, than the case's, which other layers have."""
        asked = {"recipe": case.recipe, **case.full_options}
        others = {name: seen for name, seen in self.recipes.items() if seen != asked}
        if not self.own_conversion or len(others) == len(self.recipes):
            return {}
        known = [{"recipe": facts.name, **facts.options} for facts in known_backend(case.backend).recipes]
        return {name: seen["recipe"] for name, seen in others.items() if seen in known}

    def verified(self) -> list[Product]:
        """The products, each FP8 one checked against the kernel that ran it.

        An operator that was given FP8 operands but launched a BF16 kernel counts as BF16. One whose kernel belongs to
        no known family counts as ``unknown kernel``, unless its own name says FP8, as CUTLASS's grouped products do:
        ``..._GroupProblemShape...float_e4m3_t...``.
        """
        if self.families is None:
            return list(self.products)
        fp8, bf16 = set(self.families[FP8]), set(self.families["bfloat16"])

        def kind_of(product: Product) -> str:
            family = kernel_family(product.kernel)
            if product.kind != FP8 or family in fp8 or says_fp8(product.kernel):
                return product.kind
            return "bfloat16 kernel" if family in bf16 else "unknown kernel"

        return [replace(product, kind=kind_of(product)) for product in self.products]

    def step(self, fp8_roles: Collection[Role] = ROLES) -> StepProducts:
        """The products by layer and role. ``fp8_roles``: those that the recipe runs in FP8."""
        if self.families is None:
            # Nothing was profiled: the recorded step is the step.
            return recorded_step(self.calls, [each.product for each in self.foreign], self.others)
        return profiled_step(
            self.verified(), self.calls, [each.product for each in self.foreign], self.others, fp8_roles
        )
