"""Activation checkpointing in a model of transformers by another library's function than torch's; loads no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_fp8.said import Told

if TYPE_CHECKING:
    import torch

Recompute = Callable[..., Any]
"""Called like ``torch.utils.checkpoint.checkpoint``, with a function and its arguments; all else is bound before."""


class NothingRecomputes(Told, RuntimeError):
    """The model cannot be switched to activation checkpointing from outside."""


def recompute_with(model: torch.nn.Module, recompute: Recompute) -> None:
    """Have the blocks of a transformers model call ``recompute`` in place of torch's checkpoint function.

    transformers has no argument for this. Call it after ``model.gradient_checkpointing_enable()``; raises
    :class:`NothingRecomputes` without that.
    """
    import torch

    blocks: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if not blocks:
        raise NothingRecomputes(f"no module of {type(model).__name__} has gradient checkpointing enabled")

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return recompute(_compiled_like_its_block(function), *args, **kwargs)

    # Uncompiled, because a library keeps its own checkpointing hooks out of compiled code too.
    untraced = torch.compiler.disable(call)
    for block in blocks:
        # Private: what gradient_checkpointing_enable() sets; an argument of it would replace this.
        block._gradient_checkpointing_func = untraced


def _compiled_like_its_block(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, compiled where its block is compiled and the function is a part of it.

    From 5.23 on transformers calls the checkpoint function inside a block's ``forward``, so inside what
    ``block.compile()`` compiles; what it recomputes would run uncompiled. Before 5.23 it is called around the compiled
    block, and ``function`` stays as it is.
    """
    # Private: torch has no public way to ask whether a module is compiled.
    block = next(iter(getattr(function, "args", ())), None)
    if getattr(block, "_compiled_call_impl", None) is None:
        return function
    assert isinstance(function, functools.partial), "transformers passes a partial whose first argument is the block"
    return functools.partial(compiled_once(function.func), *function.args, **function.keywords)


@functools.cache
def compiled_once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(forward)``, the same object for all blocks of a class."""
    import torch

    return torch.compile(forward)
