"""Activation checkpointing as torch and Transformer Engine do it: what will be recomputed, what is being recomputed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint

from pytest_fp8.worker.training.restored import replaced

HOMES = ("torch.utils.checkpoint", "transformer_engine.pytorch.distributed")
"""The modules with a checkpointing function; both have non-reentrant hooks of the same names."""


Bound = tuple[AbstractContextManager[Any], Callable[[], Any]]
"""The context of the first forward pass, and the function with all its arguments."""


def checkpointed() -> bool:
    """Whether what is saved now for the backward pass is dropped and recomputed; told from the hooks in force."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or not torch.is_grad_enabled():
        return False
    return hooks[0] is _drop or getattr(hooks[0], "__module__", "") in HOMES


@contextmanager
def inlined_reentrant() -> Iterator[None]:
    """Run reentrant checkpointing's function as plain code with gradients, in a forward pass without a backward pass.

    The graph then shows which gradients its backward pass will need, and the pass is told from an evaluation.
    """
    functions: list[tuple[str, str, Callable[..., Bound]]] = [
        (HOMES[0], "CheckpointFunction", _torch_arguments),
        (HOMES[1], "_CheckpointFunction", _transformer_engine_arguments),
    ]
    with ExitStack() as stack:
        for home, name, bound in functions:
            module = sys.modules.get(home)
            if module is not None and hasattr(module, name):
                stack.enter_context(replaced(module, name, _Inlined(bound)))
        yield


def _torch_arguments(function: Callable[..., Any], preserve_rng_state: bool, *inputs: Any) -> Bound:
    return nullcontext(), partial(function, *inputs)


def _transformer_engine_arguments(
    function: Callable[..., Any], distribute: Any, tracker: Any, group: Any, contexts: Any, named: Any, *inputs: Any
) -> Bound:
    return contexts()[0] if contexts is not None else nullcontext(), partial(function, *inputs, **named)


class _Inlined:
    """In place of a reentrant checkpoint's autograd function; ``bound`` knows the order of its arguments."""

    def __init__(self, bound: Callable[..., Bound]) -> None:
        self.bound = bound

    def apply(self, *given: Any) -> Any:
        context, call = self.bound(*given)
        with context, torch.autograd.graph.saved_tensors_hooks(_drop, lambda gone: gone):
            return call()


def _drop(saved: Any) -> None:
    """Keeps nothing, for there is no backward pass."""


@contextmanager
def watch_recomputation(phase: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Open ``phase`` around what activation checkpointing recomputes, in the thread that does it.

    It wraps the libraries' own hook, the one place that runs whether the layers are compiled or not. With a version
    without this hook, recomputed products stay in the backward phase, where their sizes identify most of them.
    """
    with ExitStack() as stack:
        # A library that this process has not imported recomputes nothing here.
        for module in [sys.modules[name] for name in HOMES if name in sys.modules]:
            hook = getattr(module, "_recomputation_hook", None)
            if hook is not None:
                stack.enter_context(replaced(module, "_recomputation_hook", _marked(hook, phase)))
        yield


def _marked(hook: Any, phase: Callable[[], AbstractContextManager[Any]]) -> type:
    class Marked(hook):  # type: ignore[misc]
        def __enter__(self) -> Any:
            self.marked = phase()
            self.marked.__enter__()
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            result = super().__exit__(*error)
            self.marked.__exit__(None, None, None)
            return result

    return Marked
