"""What a way of switching FP8 on must offer. One module per backend implements :class:`Backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

ALIGNMENT = 16
"""FP8 tensor-core products take operands whose inner sizes are multiples of 16 (cuBLASLt, ``torch._scaled_mm``)."""

SKIPPED = "_fp8_skipped"
"""An attribute of a Linear that is to stay in high precision; it holds the reason."""

HEADS = ("lm_head", "embed_out", "output", "head", "classifier", "score")
"""Names of output projections, which every FP8 recipe in use leaves in high precision."""


Seen = Callable[["torch.nn.Module", int, "tuple[torch.Tensor, torch.Tensor] | None"], None]
"""Takes a layer, the rows it was given, and of an FP8 layer some of its input with the product's output on it."""


@dataclass
class Conversion:
    """What a conversion did: names of the Linears it converted, and for each it left, the reason."""

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    model: torch.nn.Module | None = None
    """The model afterwards, another than was given where that is itself a Linear; ``None``: the same."""
    untied: dict[str, str] = field(default_factory=dict)
    """Weight that was one with another before the conversion and is none any more -> that other."""
    unfrozen: list[str] = field(default_factory=list)
    """Weights that were frozen before the conversion and take gradients after it."""
    lost: dict[str, str] = field(default_factory=dict)
    """Converted layer -> what it did besides its product before the conversion, and no longer does."""


@dataclass
class Prepared:
    """A model as its backend hands it back, ready to be trained."""

    model: torch.nn.Module
    conversion: Conversion
    optimizer: Any = None
    """The optimizer, where the backend wants to have it together with the model."""
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    """The forward pass up to the loss, where the backend has its own."""
    backward: Callable[[torch.Tensor], None] | None = None
    """What is called in place of ``loss.backward()``."""
    layers: Mapping[str, tuple[int, int]] | None = None
    """Name -> (in_features, out_features) of the Linears to account for, where they are not the plain model's."""


class Backend(ABC):
    """A way of switching FP8 on. Methods that need the library import it inside."""

    name: str
    distribution: str = ""
    """The package on the index, and its lowest version that is known to work."""
    minimum_version: str = ""
    token_multiple: int = ALIGNMENT
    """Tokens in a batch must be a multiple of this, for the weight gradient's inner size is the token count."""

    switches: Mapping[str, str] = {}
    """What was asked for from outside this process's code, where that is how the backend is switched on."""
    patches_others: bool = False
    """Whether importing the library changes others (transformers, peft, torch): then never outside its own arm,
    and there before those others, so that it finds them as it wants them."""
    compiles_itself: bool = False
    """Whether the library brings kernels and compiled pieces of its own: nothing is compiled on top of them."""

    keeps_state: bool = False
    """Whether using it leaves global state in its process (Accelerate's), that the user's own code would meet."""

    def available(self) -> tuple[bool, str]:
        """Whether the library is installed and recent enough, judged without importing it; and the reason."""
        return installed(self.distribution, self.minimum_version) if self.distribution else (True, "")

    def import_library(self) -> None:  # noqa: B027 - plain PyTorch needs none
        """Import the library; only ever called in an arm's own process."""

    def usable(self, recipe: str, emulated: bool) -> tuple[bool, str]:
        """The library's own word, asked inside the arm, on whether this recipe can run here."""
        return True, ""

    def build(self, case: Case, seed: int, device: str) -> torch.nn.Module | None:
        """The model itself, where the backend brings its own; ``None`` where it takes any."""
        return None

    def prepare(
        self,
        model: torch.nn.Module,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        case: Case,
        compiled: bool,
    ) -> Prepared:
        """Switch FP8 on in ``model`` as users of this backend do. ``compiled``: blocks will be compiled afterwards."""
        conversion = self.convert(model, case.recipe, case.full_options, case.emulated)
        return Prepared(model if conversion.model is None else conversion.model, conversion)

    def joined(self, model: torch.nn.Module) -> Mapping[str, Sequence[tuple[str, slice]]]:
        """Parameters that hold several of the plain model's: name -> [(plain name, its rows)], in order."""
        return {}

    @abstractmethod
    def convert(self, model: torch.nn.Module, recipe: str, options: Mapping[str, Any], emulated: bool) -> Conversion:
        """Switch FP8 on in place, parameter names and values unchanged."""

    def precision(self, recipe: str, options: Mapping[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
        """The context around each forward pass."""
        return nullcontext

    def recompute(self) -> Callable[..., Any] | None:
        """The library's own activation checkpointing, where its layers need it in place of torch's."""
        return None

    def abandon(self) -> None:  # noqa: B027 - most libraries keep nothing
        """Drop what the library keeps for the backward pass of a forward pass that gets none."""

    def explain(self, error: Exception) -> None:  # noqa: B027 - most libraries say it themselves
        """Raise a better error than this one of the first training steps, where the library's own does not say what to
        do: an exception with ``fp8_cause`` and ``fp8_next``."""

    @abstractmethod
    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        """Whether this live module is one that computes in FP8."""

    @abstractmethod
    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        """The recipe this layer would use right now, read inside its forward pass.

        Keys: ``recipe`` (a name of :mod:`pytest_fp8.recipes`, or ``off``) and the recipe's options.
        """

    def reset(self, model: torch.nn.Module) -> None:  # noqa: B027 - dynamic scaling has nothing to forget
        """Forget scaling state left by earlier steps, as a fresh model would have it."""

    def calibration_passes(self, recipe: str) -> int:
        """Forward and backward passes that a fresh model needs before its scales mean anything."""
        return 0

    def drawn(self, model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor] | None:
        """What a restart with ``seed`` puts into the live ``model``, by parameter name: all that depends on the seed,
        where building the model again would take too long. ``None``: build it again, and copy everything."""
        return None

    def saved(self, key: str) -> bool:
        """Whether a state-dict key belongs into a checkpoint: what users of this backend save."""
        return True

    def watching(self, model: torch.nn.Module, seen: Seen) -> AbstractContextManager[Any]:
        """Tell ``seen`` of each product that the library's own functions compute from a layer's weight without calling
        the layer, where no hook of the layer runs."""
        return nullcontext()

    def amax_history(self, module: torch.nn.Module) -> list[float] | None:
        """Past steps' largest magnitudes that this layer scales by, or ``None`` where nothing is kept between steps."""
        return None

    def scaling_state(self, key: str) -> bool:
        """Whether a state-dict key holds scaling state of this backend, and no weight."""
        return False


def installed(distribution: str, minimum: str) -> tuple[bool, str]:
    """Whether a package is there and recent enough, judged without importing it; and the reason.

    Versions are ordered as PEP 440 says: a development or pre-release of ``minimum`` is older than it, a post-release
    or local build is not.
    """
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import InvalidVersion, Version

    try:
        found = version(distribution)
    except PackageNotFoundError:
        return False, f"{distribution} is not installed: pip install {distribution}"
    try:
        older = Version(found) < Version(minimum)
    except InvalidVersion:
        return False, f"{distribution} {found} has no version that can be compared with {minimum}"
    if older:
        return False, f"{distribution} {found} is older than {minimum}"
    return True, f"{distribution} {found}"


def plan(model: torch.nn.Module, why: Callable[[str, torch.nn.Linear], str] | None = None) -> Conversion:
    """What a conversion of this model is meant to do: each Linear converted, or left with a reason; ``why`` gives it,
    where it is not :func:`why_skipped`."""
    result = Conversion()
    for name, module in linears(model).items():
        reason = (why or why_skipped)(name, module)
        if reason:
            result.skipped[name] = reason
        else:
            result.converted.append(name)
    return result


def observed_conversion(
    model: torch.nn.Module,
    originals: Mapping[str, tuple[int, int]],
    is_fp8: Callable[[torch.nn.Module], bool],
    leave: Sequence[str] = (),
) -> Conversion:
    """What somebody else's conversion did, read off the live model: FP8 layers, and for the others the reason there is.

    A Linear without a reason is in neither list: whether it was filtered or forgotten, only the user can say.
    """
    result = Conversion()
    modules = dict(model.named_modules())
    gone = [name for name in originals if name not in modules]
    if gone:
        raise LookupError(
            f"convert() must keep the names of the model's Linears, so that each is accounted for; gone: {gone[:4]}"
        )
    for name, sizes in originals.items():
        reason = reason_to_skip(name, *sizes) or skipped_by_name(name, leave)
        fp8 = is_fp8(modules[name])
        if fp8:
            result.converted.append(name)
        if reason and (not fp8 or skipped_by_name(name, leave)):
            # In both lists where the workload's own word was not kept, which the layers question then says.
            result.skipped[name] = reason
    return result


def skipped_by_name(name: str, patterns: Sequence[str]) -> str:
    """The reason where one of the workload's patterns names the Linear, or an empty string."""
    from fnmatch import fnmatchcase

    pattern = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "")
    return f"filter: the workload leaves {pattern!r}" if pattern else ""


def mark_skipped(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Have every conversion leave the Linears that a pattern names, with that reason."""
    for name, linear in linears(model).items():
        reason = skipped_by_name(name, patterns)
        if reason:
            setattr(linear, SKIPPED, reason)


def why_skipped(name: str, module: torch.nn.Linear) -> str:
    """The reason to leave a Linear in high precision, or an empty string to convert it."""
    return getattr(module, SKIPPED, "") or reason_to_skip(name, module.in_features, module.out_features)


def reason_to_skip(name: str, in_features: int, out_features: int) -> str:
    """The same, from name and sizes."""
    last = name.rsplit(".", 1)[-1]
    if last in HEADS:
        return "head: output projections stay in high precision"
    if any(part.startswith("lora_") for part in name.split(".")):
        return "adapter: LoRA matrices stay in high precision"
    return odd_size(in_features, out_features)


def odd_size(in_features: int, out_features: int) -> str:
    """The reason that sizes alone give, or an empty string."""
    for side, size in (("in_features", in_features), ("out_features", out_features)):
        if size % ALIGNMENT:
            return f"size: {side}={size} is not a multiple of {ALIGNMENT}"
    return ""


def ties(model: torch.nn.Module) -> dict[str, str]:
    """Parameters that are one under two names: the second name -> the first."""
    first: dict[int, str] = {}
    names = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    return {name: first[key] for name, key in names if first.setdefault(key, name) != name}


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Every ``nn.Linear`` by name, in registration order."""
    import torch

    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def put_in_place(model: torch.nn.Module, new: Mapping[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """Hang the new module wherever the old one hangs: what two blocks share is one module under several names. Gives
    the model, which is a new one where it is itself among the old."""
    for parent in list(model.modules()):
        for child, held in parent._modules.items():
            if held is not None and held in new:
                setattr(parent, child, new[held])
    return new.get(model, model)


def stacked_weights(model: torch.nn.Module) -> dict[str, list[int]]:
    """Weights of several products in one parameter, by name with their shape: experts, as transformers keeps them.

    No Linear holds them, so no conversion of Linears reaches them. torch's own modules (Conv1d) are not meant.
    """
    return {
        f"{owner}.{name}" if owner else name: list(parameter.shape)
        for owner, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, parameter in module.named_parameters(recurse=False)
        # A position embedding is [1, positions, width].
        if parameter.dim() == 3 and min(parameter.shape) > 1
    }
