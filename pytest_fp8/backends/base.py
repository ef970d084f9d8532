"""What a way to switch FP8 on must offer. One module per backend implements :class:`Backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from pytest_fp8.recipes import BackendFacts, Reason

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

ALIGNMENT = 16
"""FP8 tensor-core products take operands whose inner sizes are multiples of 16 (cuBLASLt, ``torch._scaled_mm``)."""

MakeOptimizer = Callable[["torch.nn.Module"], "torch.optim.Optimizer"]
"""Makes the optimizer of a model: the same kind in both arms."""

PARTS = "_fp8_parts"
"""The attribute of a parameter that holds several of the plain model's: [(their module's name in the place of its own,
their rows)], in the order of the rows. Under the plain names all is saved, loaded and compared."""

NoteProduct = Callable[["torch.nn.Module", int, "tuple[torch.Tensor, torch.Tensor] | None"], None]
"""Called with a layer, the number of input rows, and for an FP8 layer (some of these rows, the product's output)."""


@dataclass
class Conversion:
    """What a conversion did, by the names of the model's Linears."""

    converted: list[str] = field(default_factory=list)
    """Linears that became FP8 layers."""
    skipped: dict[str, Reason] = field(default_factory=dict)
    """Linear that stays in high precision -> why."""
    model: torch.nn.Module | None = None
    """The converted model where it is a new object (the model was itself a Linear); ``None``: converted in place."""
    layers: Mapping[str, tuple[int, int]] | None = None
    """Layer -> (in_features, out_features): what is accounted for, where that is not the plain model's Linears."""
    dropped_behaviour: dict[str, str] = field(default_factory=dict)
    """Converted layer -> what it no longer does besides its product: a hook, a forward of its own."""


@dataclass(frozen=True)
class Scaling:
    """What an FP8 layer scales by, from earlier steps. The tensors are live."""

    operands: Mapping[str, torch.Tensor]
    """Operand, as :mod:`pytest_fp8.casts` calls it -> its scale."""
    history: torch.Tensor | None = None
    """The amax of earlier steps; ``None`` where fewer than one is kept."""
    reset: Callable[[], None] = lambda: None
    """Brings it back to that of a fresh layer."""


@dataclass
class Prepared:
    """A model as its backend returns it, ready to be trained."""

    model: torch.nn.Module
    conversion: Conversion
    optimizer: Any = None
    """The optimizer, where the backend must prepare it together with the model."""
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    """The forward pass up to the loss, where the backend has its own."""
    backward: Callable[[torch.Tensor], None] | None = None
    """Called with the loss in place of ``loss.backward()``."""
    wrapped: torch.nn.Module | None = None
    """What a training step calls, where the backend parallelizes: ``DistributedDataParallel``, DeepSpeed's engine."""
    asked: str = ""
    """The precision that the environment asks for, where the environment switches this backend on."""


class Backend(BackendFacts, ABC):
    """A way to switch FP8 on. Methods that need the library import it inside."""

    # -- the library and its conversion -------------------------------------------------------------------------------

    def import_library(self) -> None:
        """Import the library. Called in an arm's own process only."""

    def usable(self, recipe: str, emulated: bool) -> tuple[bool, str]:
        """(the recipe can run in this process, the library's reason if not)."""
        return True, ""

    @abstractmethod
    def convert(self, model: torch.nn.Module, case: Case) -> Conversion:
        """Switch FP8 on in place; parameters keep names and values. ``case.emulated``: products in high precision."""

    users_trainer: Any = None
    """The user's own Trainer of the model, where the workload has one."""

    def environment(self, case: Case) -> dict[str, str]:
        """The variables with which ``accelerate launch`` asks for the case's recipe, where these switch FP8 on."""
        return {}

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case) -> Prepared:
        """Switch FP8 on in ``model`` as users of this backend do. Its blocks are compiled later."""
        conversion = self.convert(model, case)
        return Prepared(model if conversion.model is None else conversion.model, conversion)

    # -- a model that the library builds ------------------------------------------------------------------------------

    def build(self, case: Case, seed: int, device: str) -> torch.nn.Module | None:
        """The model, of a backend that brings one (``brings_model``)."""
        return None

    def seeded_values(self, model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor] | None:
        """Of such a model all values that depend on the seed, by parameter name."""
        return None

    def watch_fused_functions(self, model: torch.nn.Module, note: NoteProduct) -> AbstractContextManager[Any]:
        """Call ``note`` for each product that the library computes without calling the layer whose weight it takes."""
        return nullcontext()

    # -- its layers ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        """Whether this live module's class says that it computes in FP8. Whether it does, its products say."""

    @abstractmethod
    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        """The recipe of this layer, asked inside its forward pass: ``recipe`` (a name of :mod:`pytest_fp8.recipes`, or
        ``off``) and the recipe's options."""

    def row_multiple(self, layer: torch.nn.Module) -> int:
        """What the rows of this FP8 layer's input must be a multiple of."""
        return ALIGNMENT

    def scaling(self, layer: torch.nn.Module) -> Scaling | None:
        """What this FP8 layer keeps between steps to scale by; ``None`` where a scale is taken from the operand."""
        return None

    # -- its steps ----------------------------------------------------------------------------------------------------

    def precision(self, case: Case) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context around each forward pass."""
        return nullcontext

    def recompute_function(self) -> Callable[..., Any] | None:
        """The library's own activation checkpointing, where its layers need it; ``None``: torch's."""
        return None

    def stepped(self, model: torch.nn.Module) -> None:
        """Called after each training step, and after a restart."""

    def settle(self, model: torch.nn.Module) -> None:
        """Called after a forward pass without a backward one: drop what the library keeps for that."""

    # -- what follows from the above ----------------------------------------------------------------------------------

    @final
    def reset_scaling(self, model: torch.nn.Module) -> None:
        """Bring scaling state back to that of a fresh model."""
        for module in model.modules():
            if (kept := self.scaling(module)) is not None:
                kept.reset()
        self.stepped(model)

    @final
    def is_scaling_state(self, key: str) -> bool:
        """Whether this key of the state dict holds the backend's scaling state and no weight."""
        return bool(self.scaling_state) and key.endswith(self.scaling_state)

    @final
    def is_checkpointed(self, key: str) -> bool:
        """Whether users of this backend save this key of the state dict in a checkpoint."""
        return not self.saves or any(part in key for part in self.saves)
