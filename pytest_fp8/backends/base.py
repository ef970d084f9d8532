"""What a way to switch FP8 on must offer. One module per backend implements :class:`Backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_fp8.recipes import Reason

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

ALIGNMENT = 16
"""FP8 tensor-core products take operands whose inner sizes are multiples of 16 (cuBLASLt, ``torch._scaled_mm``)."""

MakeOptimizer = Callable[["torch.nn.Module"], "torch.optim.Optimizer"]
"""Makes the optimizer of a model: the same kind in both arms."""

FusedParams = Mapping[str, Sequence[tuple[str, slice]]]
"""Live parameter that holds several of the plain model's -> [(plain name, its rows)], in order of the rows."""

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
    dropped_behaviour: dict[str, str] = field(default_factory=dict)
    """Converted layer -> what it no longer does besides its product: a hook, a forward of its own."""


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
    groups: list[dict[str, Any]] | None = None
    """With DeepSpeed's engine: :func:`groups_of` the optimizer that it was given."""
    layers: Mapping[str, tuple[int, int]] | None = None
    """Layer -> (in_features, out_features): what is accounted for, where that is not the plain model's Linears."""


class Backend(ABC):
    """A way to switch FP8 on. Methods that need the library import it inside."""

    name: str
    distribution: str = ""
    """The library's package on the index; empty for plain PyTorch."""
    minimum_version: str = ""
    """The lowest version of it that is known to work."""
    token_multiple: int = ALIGNMENT
    """Tokens of a batch are a multiple of this: it is the inner size of the weight gradient."""
    switches: Mapping[str, str] = {}
    """What the environment asks for, where the environment switches this backend on."""
    patches_others: bool = False
    """Importing the library changes transformers, peft or torch: it is imported in its own arm only, before them."""
    compiles_itself: bool = False
    """The library brings compiled code of its own; nothing is compiled on top of it."""
    keeps_state: bool = False
    """The library leaves global state in its process, as Accelerate does."""

    def available(self) -> tuple[bool, str]:
        """(the library is installed and recent enough, its version or what is wrong), without importing it."""
        return installed(self.distribution, self.minimum_version) if self.distribution else (True, "")

    def import_library(self) -> None:  # noqa: B027 - plain PyTorch needs none
        """Import the library. Called in an arm's own process only."""

    def usable(self, recipe: str, emulated: bool) -> tuple[bool, str]:
        """(the recipe can run in this process, the library's reason if not)."""
        return True, ""

    def build(self, case: Case, seed: int, device: str) -> torch.nn.Module | None:
        """The model, where the backend brings its own; ``None`` where it takes any model."""
        return None

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case, compiled: bool) -> Prepared:
        """Switch FP8 on in ``model`` as users of this backend do. ``compiled``: its blocks will be compiled later."""
        conversion = self.convert(model, case.recipe, case.emulated)
        return Prepared(model if conversion.model is None else conversion.model, conversion)

    @abstractmethod
    def convert(self, model: torch.nn.Module, recipe: str, emulated: bool) -> Conversion:
        """Switch FP8 on in place; parameters keep names and values. ``emulated``: products in high precision."""

    def fused_params(self, model: torch.nn.Module) -> FusedParams:
        """The parameters that hold several of the plain model's."""
        return {}

    def seeded_values(self, model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor] | None:
        """All values that depend on the seed, by parameter name; ``None``: build the model again and copy its own."""
        return None

    def is_checkpointed(self, key: str) -> bool:
        """Whether users of this backend save this key of the state dict in a checkpoint."""
        return True

    def is_scaling_state(self, key: str) -> bool:
        """Whether this key of the state dict holds the backend's scaling state and no weight."""
        return False

    def scaling_tensors(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """What this FP8 layer keeps between steps to scale by, by name; empty where scaling is dynamic."""
        return {}

    def operand_scales(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Copies of the scales that this FP8 layer already has for its operands, by their names in
        :mod:`pytest_fp8.casts`; empty where a scale is taken from the operand itself."""
        return {}

    def new_layer(self, module: torch.nn.Module) -> Any:
        """This FP8 layer as before its first step, without memory for weights; ``None`` if none can be made."""
        return None

    def trusting_scaling_state(self) -> AbstractContextManager[Any]:
        """Let the library unpickle scaling state, which this arm wrote."""
        return nullcontext()

    def precision(self, recipe: str, options: Mapping[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context around each forward pass."""
        return nullcontext

    def recompute_function(self) -> Callable[..., Any] | None:
        """The library's own activation checkpointing, where its layers need it; ``None``: torch's."""
        return None

    def reset_scaling(self, model: torch.nn.Module) -> None:  # noqa: B027 - dynamic scaling keeps no state
        """Bring scaling state back to that of a fresh model."""

    def stepped(self, model: torch.nn.Module) -> None:  # noqa: B027 - most libraries need nothing
        """Called after each training step."""

    def calibration_passes(self, recipe: str) -> int:
        """How many forward and backward passes a fresh model needs before its scales fit."""
        return 0

    def drop_pending_recomputation(self) -> None:  # noqa: B027 - most libraries keep nothing
        """Drop what the library keeps for the backward pass of a forward pass that had none."""

    def raise_explained(self, error: Exception) -> None:  # noqa: B027 - most libraries explain it themselves
        """Raise an error with a code, a cause and a next step for a library's error that does not say what to do."""

    def row_multiple(self, layer: torch.nn.Module) -> int:
        """What the rows of this FP8 layer's input must be a multiple of."""
        return self.token_multiple

    @abstractmethod
    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        """Whether this live module is one that computes in FP8."""

    @abstractmethod
    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        """The recipe of this layer, asked inside its forward pass: ``recipe`` (a name of :mod:`pytest_fp8.recipes`, or
        ``off``) and the recipe's options."""

    def amax_history(self, module: torch.nn.Module) -> list[float] | None:
        """The past steps' amax that this layer scales by; ``None`` where nothing is kept."""
        return None

    def watch_fused_functions(self, model: torch.nn.Module, note: NoteProduct) -> AbstractContextManager[Any]:
        """Call ``note`` for each product that the library computes without calling the layer whose weight it takes."""
        return nullcontext()


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its groups as they were made, with the model's parameters: DeepSpeed puts buffers of its own into them."""
    return [dict(group, params=list(group["params"])) for group in optimizer.param_groups]


def installed(distribution: str, minimum: str) -> tuple[bool, str]:
    """Whether a package is there and recent enough, without importing it, and the reason. PEP 440 orders versions: a
    pre-release of ``minimum`` is older than it."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import InvalidVersion, Version

    from pytest_fp8.libraries import wanted

    try:
        found = version(distribution)
    except PackageNotFoundError:
        return False, f"{distribution} is not installed: pip install {wanted(distribution)}"
    try:
        older = Version(found) < Version(minimum)
    except InvalidVersion:
        return False, f"{distribution} {found} has no version that can be compared with {minimum}"
    if older:
        return False, f"{distribution} {found} is older than {minimum}"
    return True, f"{distribution} {found}"
