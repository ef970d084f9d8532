"""An arm's ledger: all that it does in one training step and around it, as plain data; and how it is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_fp8.questions.layers.products import Product

OUTSIDE = "code outside all modules"
"""Owner of what no module called."""


@dataclass(frozen=True)
class TensorNote:
    """A tensor that entered a module from outside."""

    shape: Sequence[int]
    dtype: str
    digest: str = ""
    """Of its content; empty where the content comes of products, which FP8 rounds otherwise."""


@dataclass(frozen=True)
class Entered:
    """One outermost call: of a module that no other module called."""

    module: str
    phase: str
    training: bool
    gradients: bool
    """Whether autograd recorded it."""
    tensors: Sequence[TensorNote]


@dataclass(frozen=True)
class ModuleCalls:
    """Equal calls of one module in one phase."""

    module: str
    phase: str
    """``forward``, ``recompute`` or ``evaluation``."""
    shape: Sequence[int]
    """Of the first tensor among its arguments."""
    dtype: str
    training: bool
    count: int
    outermost: bool = False


@dataclass(frozen=True)
class OwnedProduct:
    """A matrix product and the module that called it; the model's own name is empty."""

    owner: str
    product: Product
    weight: str = ""
    """The layer whose weight it multiplies in training without a call of the layer."""


def enclosing(name: str, modules: Collection[str]) -> str | None:
    """The one of ``modules`` that is the module ``name`` or holds it."""
    parts = name.split(".")
    names = (".".join(parts[:size]) for size in range(1, len(parts) + 1))
    return next((each for each in names if each in modules), None)


@dataclass(frozen=True)
class Draw:
    """One operator that drew random numbers."""

    phase: str
    owner: str
    """The module that called it."""
    operator: str
    shape: Sequence[int]
    """Of what it gave."""
    state: str
    """Digest of the generators' state before it."""


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer under its plain name."""

    shape: Sequence[int]
    dtype: str
    digest: str
    """Empty where the tensor holds values in FP8 or another quantised form."""
    trained: bool
    """``requires_grad``."""
    hooks: int = 0
    """Hooks on the parameter itself."""
    same_as: str = ""
    """The first name of the same tensor, where it has several."""
    buffer: bool = False


@dataclass(frozen=True)
class OptimizerNote:
    """The optimizer as it is before the first step."""

    kind: str
    groups: Sequence[Mapping[str, str]]
    """All of each group's settings but its parameters, in words."""
    members: Mapping[str, int]
    """Parameter under its plain name -> the index of its group."""
    schedule: Mapping[str, str] = field(default_factory=dict)
    """Class and state of the learning-rate schedule, in words."""


@dataclass(frozen=True)
class Updates:
    """What the optimizer made of the same gradients in both arms, in some steps from the same weights."""

    steps: int
    size: float
    """Root mean square of the gradients."""
    sketches: Mapping[str, str]
    """Parameter -> sketch of how far it moved: float32 numbers in base64, as those of gradients."""


NO_UPDATES = Updates(0, 0.0, {})


@dataclass(frozen=True)
class Collective:
    """Equal collectives of one step of one rank."""

    phase: str
    operation: str
    """``all-gather``, ``reduce-scatter``, ``all-reduce``, ``broadcast`` or ``all-to-all``."""
    dtype: str
    """As it travels: FSDP2 sends what it gathers in several types as ``uint8``."""
    bytes: int
    """Of the whole tensor that is gathered or reduced."""
    count: int


@dataclass(frozen=True)
class ArmLedger:
    """One instrumented step of an arm, from the same weights, batch and random state as the other arm's."""

    batch: Sequence[TensorNote]
    entered: Sequence[Entered]
    calls: Sequence[ModuleCalls]
    """Of rank 0."""
    classes: Mapping[str, str]
    """Module that was called -> its class."""
    products: Sequence[OwnedProduct]
    operators: Mapping[str, Mapping[str, int]]
    """Owner -> ``operator dtype`` -> calls in the forward pass, without views and casts."""
    waits: Mapping[str, Mapping[str, int]]
    """Owner -> phase -> how often the host waited for a value."""
    backward: int
    stepped: int
    gradients: Sequence[str]
    """Parameters that have a gradient when the optimizer steps."""
    norm_kept: float
    """The gradients' norm when the optimizer steps, over their norm at the end of the backward pass."""
    loss: float
    loss_dtype: str
    random: str
    """Digest of the generators' state after the step."""
    draws: Sequence[Draw]
    """The operators that drew random numbers, in order."""
    before: Mapping[str, Weight]
    after: Mapping[str, Weight]
    """Parameters and buffers before and after the conversion."""
    optimizer: OptimizerNote
    updates: Updates
    switches: Mapping[str, str]
    """Global switches of torch inside the forward pass."""
    switches_after: Mapping[str, str]
    fp8_layers: Sequence[str]
    """Layers that are converted or meant to be."""
    linears: Sequence[str]
    """Every nn.Linear of the unconverted model."""
    routed: Sequence[str]
    """Modules that did other work after the weights were moved, as an expert does that a router gives other rows."""
    watched: bool
    """Whether operators were watched. Not where a library brings compiled code that refuses it."""
    recomputed_otherwise: Sequence[str] = ()
    """Modules in which recomputation drew other random numbers than the first forward pass: another dropout mask."""
    ranks: int = 1
    wire: Sequence[Collective] = ()
    """What travelled between the ranks."""
    elsewhere: Sequence[Sequence[ModuleCalls]] = ()
    """``calls`` of the other ranks, from rank 1 on."""

    def of_ranks(self) -> list[Sequence[ModuleCalls]]:
        """The calls of each rank."""
        return [self.calls, *self.elsewhere]


@dataclass(frozen=True)
class TwoLedgers:
    """Both arms' ledgers, and the backend that made the FP8 arm."""

    reference: ArmLedger
    fp8: ArmLedger
    backend: str

    def routed(self) -> set[str]:
        """Modules whose work is not compared, since it follows from numbers that the model computes.

        With one member of a ``ModuleList`` all others: an expert may keep its number of rows by chance.
        """
        found = {*self.reference.routed, *self.fp8.routed}
        arms = (self.reference, self.fp8)
        called = {call.module for arm in arms for calls in arm.of_ranks() for call in calls}
        members = (name.rpartition(".") for name in found)
        lists = {holder for holder, _, index in members if index.isdigit()} - called
        return found | {name for name in called if name.startswith(tuple(f"{each}." for each in lists))}
