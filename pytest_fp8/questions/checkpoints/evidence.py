"""What both sides of a checkpoint held: the arm that saved it, and the arm that loaded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Entry = Any
"""A number as it is; a tensor as the text ``tensor <digest>``."""
Kept = Mapping[str, Mapping[str, Entry]]
"""What an arm keeps beside its weights and the optimizer's state of each parameter, by readable names: ``schedule``
(``last_epoch``, ``base_lrs[0]``), ``groups`` (``group 0: lr``), ``attributes`` of the optimizer (``ema[0]``)."""


@dataclass(frozen=True)
class Held:
    """What an arm holds of a training state. Names are without prefixes of wrappers."""

    digests: Mapping[str, int] = field(default_factory=dict)
    """Weight -> digest of its values."""
    optimizer_digests: Mapping[str, Any] = field(default_factory=dict)
    """Optimizer tensor -> digest of its values in the dtype of its parameter; a number or text as it is. Empty where
    the optimizer does not travel."""
    untied: Mapping[str, str] = field(default_factory=dict)
    """Weight that the conversion made one of its own -> the weight that it was tied to."""
    kept: Kept = field(default_factory=dict)
    """Asked of the user's own functions alone, as what follows."""
    flags: Sequence[str] = ()
    """What the call did to the modes of modules and to which parameters are trained: ``model.training = False``."""


@dataclass(frozen=True)
class Saved(Held):
    """What an arm said of a checkpoint that it wrote. The field names are the keys of its answer to ``save``."""

    changed_by_saving: Sequence[str] = ()
    """Weights that the call itself changed in the live model."""
    on_disk: Mapping[str, int] = field(default_factory=dict)
    """Type of the stored values -> how many tensors."""
    frozen: int = 0
    """Tensors of a frozen base, which are not stored."""
    left_out: Sequence[str] = ()
    """What our stores do not carry: entries of the state dict that are no data alone."""
    foreign: int = 0
    """Parameters that the optimizer steps and the model does not have, such as float32 master copies."""


@dataclass(frozen=True)
class Loaded(Held):
    """What an arm said of a checkpoint that it read. The field names are the keys of its answer to ``load``."""

    refused: str = ""
    """The error of ``load_state_dict()``, and whose it is: nothing more was asked."""
    untouched: Sequence[str] = ()
    """Weights that are what they were before the load, which was made another checkpoint's."""
    strays: bool = False
    """Whether the optimizer steps more parameters that the model does not have than before the call."""
    stale: Sequence[str] = ()
    """FP8 layers that, evaluated after a load, multiply by the weights of before it."""
    unchecked: str = ""
    """Why FP8 layers are not among those that were looked at for :attr:`stale`."""


@dataclass(frozen=True)
class Resumed:
    """The steps that an arm trained after it had saved or loaded a checkpoint."""

    losses: Sequence[float]
    data: int
    """Fingerprint of the batches."""
    inputs: Sequence[int]
    """Fingerprint of what entered the model, by call."""
    kept: Kept = field(default_factory=dict)
    """After these steps; empty where the workload has no functions of its own."""


NOT_RESUMED = Resumed([], 0, [])


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
