"""What both sides of a checkpoint held: the arm that saved it, and the arm that loaded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Entry = Any
"""A number as it is; a tensor as the text ``tensor <digest>``."""


@dataclass(frozen=True)
class Kept:
    """What an arm keeps beside its weights and the optimizer's state of each parameter, by readable names."""

    schedule: Mapping[str, Entry]
    """Of the schedule at ``optimizer.scheduler``: ``last_epoch``, ``base_lrs[0]``."""
    groups: Mapping[str, Entry]
    """Of the optimizer's parameter groups: ``group 0: lr``."""
    attributes: Mapping[str, Entry]
    """Of the optimizer as an object: ``ema[0]``."""
    buffers: Mapping[str, Entry]
    """Buffers that the model declares as not persistent."""
    generators: Mapping[str, Entry]
    """States of the random generators: ``torch``, ``torch on the GPU``, ``random``, ``numpy``."""


@dataclass(frozen=True)
class OwnSaved:
    """What an arm held when the user's own ``save()`` wrote its checkpoint."""

    kept: Kept
    changed_by_saving: Sequence[str]
    """Weights that the call itself changed in the live model."""
    buffers: Sequence[str]
    """Those of the weights that are buffers."""
    casts: Mapping[str, Mapping[str, int]]
    """dtype -> weight -> digest of its values after a cast to that dtype and back."""
    drawn: Sequence[str]
    """Generators that a forward pass in training draws from."""
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What the call did to the model's flags, in words -> the modules or parameters: ``put into eval mode``."""
    foreign: int = 0
    """Parameters that the optimizer steps and the model does not have, such as float32 master copies."""


@dataclass(frozen=True)
class OwnLoaded:
    """What an arm held after the user's own ``load()`` had read a checkpoint into it."""

    kept: Kept
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """As :attr:`OwnSaved.flags`."""
    strays: bool = False
    """Whether the optimizer steps more parameters that the model does not have than before the call."""


@dataclass(frozen=True)
class Saved:
    """What an arm said of a checkpoint that it wrote. The field names are the keys of its answer to ``save``."""

    keys: Sequence[str]
    """Names of the weights, without prefixes of wrappers."""
    digests: Mapping[str, Any]
    """Weight -> digest of its values."""
    optimizer_digests: Mapping[str, Any]
    """Optimizer tensor -> digest of its values; a number or text as it is. Empty where the optimizer was not saved."""
    scaling_state: Sequence[str]
    """Scaling state that is left out on purpose."""
    narrowed: Mapping[str, int] = field(default_factory=dict)
    """Optimizer tensor of another dtype than its parameter -> digest after the cast of ``load_state_dict`` to that of
    the parameter."""
    on_disk: Mapping[str, int] = field(default_factory=dict)
    """Type of the stored values -> how many tensors."""
    bytes: int = 0
    untied: Mapping[str, str] = field(default_factory=dict)
    """Weight that the conversion made one of its own -> the weight that it was tied to."""
    frozen: int = 0
    """Tensors of a frozen base, which are not stored."""
    left_out: Sequence[str] = ()
    """What these stores do not carry: entries of the state dict that are no data alone."""
    own: OwnSaved | None = None
    """``None`` where one of pytest-fp8's own stores was written."""


@dataclass(frozen=True)
class Loaded:
    """What an arm said of a checkpoint that it read. The field names are the keys of its answer to ``load``."""

    loaded: bool
    """False where ``missing``, ``unexpected`` or ``wrong_shape`` has an entry, and nothing was loaded; or where a load
    was refused."""
    digests: Mapping[str, Any] = field(default_factory=dict)
    """Of the weights that the arm holds afterwards; empty where nothing was loaded."""
    optimizer_digests: Mapping[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()
    """Weights of the arm that the checkpoint does not have."""
    unexpected: Sequence[str] = ()
    """Keys of the checkpoint that the arm has no weight for."""
    wrong_shape: Sequence[str] = ()
    untouched: Sequence[str] = ()
    """Weights that are what they were before the load, which was made another checkpoint's."""
    untied: Mapping[str, str] = field(default_factory=dict)
    """As in :class:`Saved`."""
    refused: str = ""
    """The error of ``load_state_dict()``, and whose it is."""
    stale: Sequence[str] = ()
    """FP8 layers that, evaluated after a load, multiply by the weights of before it."""
    unchecked: str = ""
    """Why FP8 layers are not among those that were looked at for :attr:`stale`."""
    left_out: Sequence[str] = ()
    """As in :class:`Saved`: what was carried and has no place in the arm."""
    own: OwnLoaded | None = None
    """As in :class:`Saved`."""


@dataclass(frozen=True)
class Resumed:
    """The steps that an arm trained after it had saved or loaded a checkpoint."""

    losses: Sequence[float]
    data: int
    """Fingerprint of the batches."""
    inputs: Sequence[int]
    """Fingerprint of what entered the model, by call."""
    kept: Kept
    """After these steps."""


NOT_RESUMED = Resumed([], 0, [], Kept({}, {}, {}, {}, {}))


@dataclass(frozen=True)
class Apart:
    """What the precision alone does: FP8 against BF16 where no checkpoint was carried."""

    logits: float
    """Relative L2 distance of the logits on one and the same weights."""
    values: int
    """How many logits these are."""
    losses: float
    """Mean of FP8's losses less BF16's over the same first steps from the same weights."""
    moved_logits: Sequence[float] = ()
    """Relative L2 distances of the trained reference's logits when its Linears' weights are moved by as much as FP8
    moves products, one for each way; asked where :attr:`logits` is not enough."""
    moved_losses: Sequence[float] = ()
    """How far the mean loss of the steps that it goes on to train moves then."""


@dataclass(frozen=True)
class Transfer:
    """One checkpoint carried from a source arm to a target arm through one store."""

    arms: tuple[str, str]
    """The arm that saved and the arm that loaded: ``fp8`` and ``bf16``, or the reverse."""
    store: str
    """``safetensors``, ``dcp`` or ``own``."""
    saved: Saved
    loaded: Loaded
    logit_distance: float
    """Relative L2 distance of the target's logits after loading from the source's."""
    logit_limit: float
    start: Apart = Apart(0.0, 0, 0.0)
    same_input: bool = True
    """Whether the same entered the model for both logits: a step may draw its data by itself."""
    with_optimizer: bool = False
    source: Resumed = NOT_RESUMED
    """The steps that the source went on to train after saving."""
    resumed: Resumed = NOT_RESUMED
    """The same steps, trained by the target after loading."""

    @property
    def direction(self) -> str:
        """``fp8 -> bf16``."""
        return " -> ".join(self.arms)
