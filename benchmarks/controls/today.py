"""The checks that people have today, each written as its source states it. ``None``: it cannot be asked here.

Each takes what can be seen of one arm and says whether the check *passes*. A control is caught by a check that fails.
"""

from __future__ import annotations

from collections.abc import Callable

from control_runner import Seen

FP8_CLASSES = ("Float8Linear", "transformer_engine.pytorch.module.linear.Linear")


def class_name_occurs(seen: Seen) -> bool | None:
    """The class of an FP8 layer occurs in the printed model: ``assert "Float8Linear" in str(model)``.

    Source: the usual assertion of users' scripts, for torchao; ``te.Linear`` for Transformer Engine.
    """
    return any(name in " ".join(seen.kinds) for name in FP8_CLASSES) if seen.kinds else None


def any_layer_helper(seen: Seen) -> bool | None:
    """``any(isinstance(m, te.Linear))`` over the model's modules, ``Float8Linear`` where torchao is the backend.

    Source: accelerate 1.15.0, ``utils/transformer_engine.py: has_transformer_engine_layers`` and
    ``utils/ao.py: has_ao_layers``: both return True at the first such module.
    """
    for kind in seen.kinds:
        if kind.startswith("transformer_engine.") or kind == "torchao.float8.float8_linear.Float8Linear":
            return True
    return False if seen.kinds else None


def te_count(seen: Seen) -> bool | None:
    """``te_count > 0``, where ``te_count`` counts the modules that are the FP8 library's own.

    Source: the script that this project began with, which counts Transformer Engine's modules. Torchao's are counted
    here as well; otherwise every healthy torchao arm would fail.
    """
    count = sum(kind.startswith(("transformer_engine.", "torchao.")) for kind in seen.kinds)
    return count > 0 if seen.kinds else None


def loss_within_5_percent(seen: Seen) -> bool | None:
    """The last loss of one FP8 run within 5 % of one BF16 run's.

    Source: the tolerance of FP8 against BF16 loss comparisons; Megatron-LM issue 1152 (3.148 against 3.054) is inside.
    """
    if not seen.fp8_losses:
        return None
    return abs(seen.fp8_losses[-1] / seen.bf16_losses[-1] - 1) <= 0.05


def time_within_5_percent(seen: Seen) -> bool | None:
    """The FP8 arm's step time at most 5 % above the stored one. Needs a GPU.

    Source: Megatron-LM's functional tests hold the median iteration time to 5 % of a stored value.
    """
    if seen.fp8_ms is None or seen.stored_ms is None:
        return None
    return seen.fp8_ms <= 1.05 * seen.stored_ms


CHECKS: dict[str, Callable[[Seen], bool | None]] = {
    "class\nname": class_name_occurs,
    "any\nlayer": any_layer_helper,
    "te_count\n> 0": te_count,
    "loss\n5 %": loss_within_5_percent,
    "time\n5 %": time_within_5_percent,
}
