"""Watches the calls of an arm's layers in one eager forward pass or hand-written step: a hook on every Linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from pytest_fp8.backends.base import Backend
from pytest_fp8.questions.layers.products import LayerCall
from pytest_fp8.worker.training.restored import around, hooked
from pytest_fp8.worker.watch.reached import Reached
from pytest_fp8.worker.watch.recomputation import checkpointed, inlined_reentrant


class Part:
    """Which part of a hand-written step is running, and how many backward passes it has begun."""

    def __init__(self) -> None:
        self.name, self.turns = "", 0

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        outer, self.name = self.name, name
        self.turns += name == "backward"
        yield
        self.name = outer


class LayerWatch:
    """What the hooks on the layers have noted.

    ``layers``: name -> (in_features, out_features) of the layers to watch. ``part``: given where a whole hand-written
    step runs, backward included. Then only calls in its forward part count; one that comes in its backward part is the
    recomputation of an earlier call.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Mapping[str, tuple[int, int]],
        backend: Backend,
        part: Part | None,
    ) -> None:
        self.calls: list[LayerCall] = []
        """In execution order."""
        self.recipes: dict[str, dict[str, Any]] = {}
        """FP8 layer -> the recipe in force, read inside its forward pass."""
        self._without_gradients: set[int] = set()
        """Calls without gradients: a target network or an evaluation; or the first pass of reentrant checkpointing,
        where the backward pass calls the layer again."""
        self.reached = Reached()
        """Which of the calls a backward pass reaches."""
        self._layers, self._backend, self._part = layers, backend, part
        modules = dict(model.named_modules())
        self._modules = {name: modules[name] for name in layers}
        self._names = {id(module): name for name, module in self._modules.items()}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Keep hooks on the layers while the context is open."""
        with hooked(around(self._modules, self._before, self.reached.after)):
            yield

    def counted(self) -> list[LayerCall]:
        """The calls that train. One that no backward pass reaches (its output is detached) owes no gradients."""
        return [
            replace(call, needs_dgrad=False, needs_wgrad=False) if self.reached.missed(index) else call
            for index, call in enumerate(self.calls)
            if call.recomputed or index not in self._without_gradients
        ]

    def note_fused(self, module: torch.nn.Module, rows: int, _: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Note a product that a library's function computed without calling the layer."""
        name = self._names[id(module)]
        # Such functions compute the input's gradient whether it is needed or not.
        self._note(name, module, rows, needs_dgrad=True)

    def _note(self, name: str, module: torch.nn.Module, rows: int, needs_dgrad: bool) -> None:
        fp8 = self._backend.is_fp8_layer(module)
        if fp8:
            self.recipes[name] = self._backend.recipe_in_force(module)
        inputs, outputs = self._layers[name]
        needs_wgrad = any(p.requires_grad for p in module.parameters() if p.dim() > 1)
        self.calls.append(
            LayerCall(
                name=name,
                in_features=inputs,
                out_features=outputs,
                rows=rows,
                needs_dgrad=needs_dgrad,
                needs_wgrad=needs_wgrad,
                fp8=fp8,
                training=module.training,
                recomputed=checkpointed(),
                turn=self._part.turns if self._part is not None else 0,
            )
        )

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = input_of(args, kwargs)
            index: int | None = len(self.calls)
            if self._part is not None and self._part.name != "forward":
                in_backward = self._part.name == "backward"
                index = self._mark_recomputed(name, tensor.requires_grad) if in_backward else None
            else:
                if not torch.is_grad_enabled():
                    self._without_gradients.add(len(self.calls))
                self._note(name, module, tensor.numel() // max(1, tensor.shape[-1]), tensor.requires_grad)
            self.reached.begin(name, index)

        return before

    def _mark_recomputed(self, name: str, needs_dgrad: bool) -> int | None:
        """Mark the latest call of this layer as recomputed, and give its index. Reentrant checkpointing runs without
        gradients at first, so only its recomputation shows which gradients are needed."""
        for index in range(len(self.calls) - 1, -1, -1):
            call = self.calls[index]
            if call.name == name and (not call.recomputed or (needs_dgrad and not call.needs_dgrad)):
                self.calls[index] = replace(call, recomputed=True, needs_dgrad=call.needs_dgrad or needs_dgrad)
                return index
        return None


def observe_forward(
    model: torch.nn.Module,
    layers: Mapping[str, tuple[int, int]],
    backend: Backend,
    forward: Callable[[], Any],
    part: Part | None = None,
) -> tuple[list[LayerCall], dict[str, dict[str, Any]]]:
    """Run ``forward`` with a :class:`LayerWatch`; gives calls that train and recipes in force. Without a ``part``,
    ``forward`` gives the loss, from which the backward pass would begin.

    Compiled code runs uncompiled in this one pass, because hooks do not run inside it. What the compiled step executes
    is read from a profile.
    """
    watch = LayerWatch(model, layers, backend, part)
    with ExitStack() as stack:
        stack.enter_context(watch.hooked())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if part is None and backend.brings_model:
            # The forward pass keeps its activations: torch.func, in this library's loss, refuses the hooks below.
            stack.enter_context(backend.watch_fused_functions(model, watch.note_fused))
        elif part is None:
            # Only the graph's flags are needed, so nothing is saved for a backward pass: an eager 8B forward would
            # hold 40 GiB of activations.
            nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
            stack.enter_context(nothing)
            stack.enter_context(inlined_reentrant())
        loss = forward()
    if part is None:
        watch.reached.will_reach(loss)
    return watch.counted(), watch.recipes


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The layer's input: the first tensor among its arguments, whose name differs between libraries."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
