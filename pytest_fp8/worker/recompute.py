"""Activation checkpointing by another library's function than torch's, in a model of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Recompute = Callable[..., Any]
"""Called as ``torch.utils.checkpoint.checkpoint`` is: a function and its arguments, all else bound beforehand."""


class NothingRecomputes(RuntimeError):
    """A model that cannot be told from outside to recompute its activations."""

    fp8_cause = (
        "only models of transformers, with gradient checkpointing enabled, can be told from outside to recompute"
    )
    fp8_next = (
        "model.gradient_checkpointing_enable() first; or recompute in the model's own code, under Transformer Engine "
        "by transformer_engine.pytorch.checkpoint"
    )


def recompute_with(model: torch.nn.Module, recompute: Recompute) -> None:
    """Have the blocks of a transformers model call ``recompute`` where they call torch's checkpoint: for a function
    of another library there is no argument. Comes after ``gradient_checkpointing_enable()``; raises
    :class:`NothingRecomputes` without it."""
    import torch

    blocks: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if not blocks:
        raise NothingRecomputes(f"no module of {type(model).__name__} has gradient checkpointing enabled")

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return recompute(_compiled_like_its_block(function), *args, **kwargs)

    # A library that recomputes by hooks of its own keeps them out of compiled code: so is what comes before.
    untraced = torch.compiler.disable(call)
    for block in blocks:
        block._gradient_checkpointing_func = untraced


def _compiled_like_its_block(function: Callable[..., Any]) -> Callable[..., Any]:
    """From 5.23 on transformers recomputes within a block's ``forward``, so within what ``block.compile()`` compiles,
    and what is recomputed would run uncompiled. Before, it does so around the compiled block: ``function`` as it is."""
    block = next(iter(getattr(function, "args", ())), None)
    if getattr(block, "_compiled_call_impl", None) is None:
        return function
    assert isinstance(function, functools.partial), "what transformers binds the block to"
    return functools.partial(_compiled(function.func), *function.args, **function.keywords)


@functools.cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Once for all blocks of a class."""
    import torch

    return torch.compile(forward)
