"""Tells which calls of layers a backward pass reaches: a call whose output is detached has no gradients to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_fp8.zoo.batch import tensors_in


class Reached:
    """The autograd nodes of calls, by the calls' indices; and which of these calls a backward pass has reached.

    The nodes are hooked and not the outputs: where an output is a view and is changed in place (``out += x``), the
    backward pass goes past the output's own node, but not past those of the product.
    """

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        """Sequence number of a node -> index of the call that made it. Each thread counts anew."""
        self._watched: set[int] = set()
        self._reached: set[int] = set()
        self._running: dict[str, tuple[int, int]] = {}
        """Layer -> index of its call that runs now, and the sequence number at which its autograd nodes begin."""

    def begin(self, layer: str, index: int | None) -> None:
        """A call of this layer begins. ``None``: one that is none of the calls."""
        self._running.pop(layer, None)
        # A recomputation makes a second graph, which only reentrant checkpointing goes back through.
        if index is not None and not self.watched(index):
            self._running[layer] = index, torch.autograd._get_sequence_nr()

    def after(self, layer: str) -> Callable[..., None]:
        """A hook for the end of this layer's calls."""

        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            index, start = self._running.pop(layer, (None, 0))
            if index is not None:
                self._watch(index, output, start)

        return hook

    def _watch(self, index: int, output: Any, start: int) -> None:
        """Note the nodes of a call: what leads to its output and was made since sequence number ``start``."""
        for node in _nodes([tensor.grad_fn for tensor in tensors_in(output)], since=start):
            self._watched.add(index)
            self._calls[node._sequence_nr()] = index
            node.register_prehook(self._noting(index))

    def watched(self, index: int) -> bool:
        """Whether the call has nodes; one that made no graph has none."""
        return index in self._watched

    def will_reach(self, loss: Any) -> None:
        """Note the calls that a backward pass from this loss would reach; all of them where it has no graph."""
        start = loss.grad_fn if isinstance(loss, torch.Tensor) else None
        if start is None:
            self._reached.update(self._watched)
            return
        numbers = {node._sequence_nr() for node in _nodes([start])}
        self._reached.update(index for number, index in self._calls.items() if number in numbers)

    def missed(self, index: int) -> bool:
        """Whether the call made a graph that no backward pass reaches."""
        return self.watched(index) and index not in self._reached

    def _noting(self, index: int) -> Callable[..., None]:
        def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
            if any(gradient is not None for gradient in gradients):
                self._reached.add(index)

        return note


def _nodes(starts: list[Any], since: int = 0) -> Iterator[Any]:
    """The nodes from which gradients flow on from ``starts``, but for the parameters' own and those made earlier."""
    seen: set[Any] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or hasattr(node, "variable") or node._sequence_nr() < since:
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)
