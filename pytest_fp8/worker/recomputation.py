"""Activation checkpointing as torch and Transformer Engine do it: what will be recomputed, what is being recomputed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint

HOMES = ("torch.utils.checkpoint", "transformer_engine.pytorch.distributed")
"""The modules whose non-reentrant checkpointing this knows; each has hooks of its own, under the same names."""


Bound = tuple[AbstractContextManager[Any], Callable[[], Any]]
"""The context of the first forward pass, and the function with all its arguments."""


def checkpointed() -> bool:
    """Whether what is saved now for the backward pass is dropped and recomputed: by the hooks that are in force."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or not torch.is_grad_enabled():
        return False
    return hooks[0] is _drop or getattr(hooks[0], "__module__", "") in HOMES


@contextmanager
def straightened() -> Iterator[None]:
    """Run what reentrant checkpointing runs without gradients as plain code, in a forward pass that is only looked at:
    the graph then shows what its backward pass will owe, and tells it from an evaluation."""
    functions: list[tuple[str, str, Callable[..., Bound]]] = [
        (HOMES[0], "CheckpointFunction", _torch_s),
        (HOMES[1], "_CheckpointFunction", _transformer_engine_s),
    ]
    with ExitStack() as back:
        for home, name, bound in functions:
            module = sys.modules.get(home)
            if module is not None and hasattr(module, name):
                back.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, _Straight(bound))
        yield


def _torch_s(function: Callable[..., Any], preserve_rng_state: bool, *inputs: Any) -> Bound:
    return nullcontext(), partial(function, *inputs)


def _transformer_engine_s(
    function: Callable[..., Any], distribute: Any, tracker: Any, group: Any, contexts: Any, named: Any, *inputs: Any
) -> Bound:
    return contexts()[0] if contexts is not None else nullcontext(), partial(function, *inputs, **named)


class _Straight:
    """In place of a reentrant checkpoint's autograd function; ``bound`` knows the order of its arguments."""

    def __init__(self, bound: Callable[..., Bound]) -> None:
        self.bound = bound

    def apply(self, *given: Any) -> Any:
        context, call = self.bound(*given)
        with context, torch.autograd.graph.saved_tensors_hooks(_drop, lambda gone: gone):
            return call()


def _drop(saved: Any) -> None:
    """Keeps nothing for a backward pass that never comes."""


@contextmanager
def watch_recomputation(phase: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Open ``phase`` around what activation checkpointing recomputes, in the thread that does it.

    The libraries' own hook is the one place that says so wherever the layers are compiled; a version without it leaves
    recomputed products in the backward phase, where their extents tell most of them.
    """
    with ExitStack() as watched:
        # A library that this process has not imported recomputes nothing here.
        for module in [sys.modules[name] for name in HOMES if name in sys.modules]:
            watched.enter_context(_marked(module, phase))
        yield


@contextmanager
def _marked(module: Any, phase: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    hook = getattr(module, "_recomputation_hook", None)
    if hook is None:
        yield
        return

    class Marked(hook):  # type: ignore[misc, valid-type]
        def __enter__(self) -> Any:
            self.marked = phase()
            self.marked.__enter__()
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            result = super().__exit__(*error)
            self.marked.__exit__(None, None, None)
            return result

    module._recomputation_hook = Marked
    try:
        yield
    finally:
        module._recomputation_hook = hook
