"""What both sides of a checkpoint held: the arm that saved it, and the arm that loaded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Saved:
    """What an arm said of a checkpoint that it wrote. The field names are the keys of its answer to ``save``."""

    keys: Sequence[str]
    """Names of the weights, without prefixes of wrappers."""
    wrapped: Sequence[str]
    """Keys on disk that carry a wrapper's prefix (``_orig_mod.``, ``module.``)."""
    aliases: Mapping[str, str]
    """Second name of a tied weight -> the name that it is stored under."""
    untied: Mapping[str, str]
    """Weight that the conversion made one of its own -> the weight that it was tied to."""
    scaling_state: Sequence[str]
    """Scaling state that is left out on purpose."""
    frozen: int
    """Tensors of a frozen base, which are not stored."""
    on_disk: Mapping[str, int]
    """Type of the stored values -> how many tensors."""
    digests: Mapping[str, Any]
    """Weight -> digest of its values."""
    optimizer_digests: Mapping[str, Any]
    """Optimizer tensor -> digest of its values; empty where the optimizer was not saved."""
    bytes: int


@dataclass(frozen=True)
class Loaded:
    """What an arm said of a checkpoint that it read. The field names are the keys of its answer to ``load``."""

    missing: Sequence[str]
    """Weights of the arm that the checkpoint does not have."""
    unexpected: Sequence[str]
    """Keys of the checkpoint that the arm has no weight for."""
    wrong_shape: Sequence[str]
    rebuilt_scaling_state: Sequence[str]
    untied: Mapping[str, str]
    """As in :class:`Saved`."""
    loaded: bool
    """False where one of the three lists above has an entry: nothing is loaded then."""
    digests: Mapping[str, Any]
    """Of the weights that the arm holds afterwards; empty where nothing was loaded."""
    optimizer_digests: Mapping[str, Any]


@dataclass(frozen=True)
class Transfer:
    """One checkpoint carried from a source arm to a target arm through one store."""

    direction: str
    """``fp8 -> bf16`` or ``bf16 -> fp8``."""
    store: str
    """``safetensors`` or ``dcp``."""
    saved: Saved
    loaded: Loaded
    logit_distance: float
    """Relative L2 distance of the target's logits after loading from the source's."""
    logit_limit: float
    with_optimizer: bool = False
    source_losses: Sequence[float] = ()
    """Of the steps that the source went on to train after saving."""
    resumed_losses: Sequence[float] = ()
    """Of the same steps, trained by the target after loading."""
