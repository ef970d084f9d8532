"""Looks at the calls of the FP8 layers in each step of a curve: whether each multiplies in FP8, and a few right values.

By hooks, so where nothing is compiled. No number of the curve changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.backends.base import Backend
from pytest_fp8.case import Case
from pytest_fp8.casts import E4M3, LINE, TENSOR, Cast
from pytest_fp8.questions.loss.evidence import LayerCalls, Look
from pytest_fp8.worker.training.restored import Hook, hooked
from pytest_fp8.worker.watch.product_accuracy import Expected, Operand, is_product

LOOKED_AT = 3
"""Layers of a step whose product is looked at, drawn anew in each step."""
ROWS, COLUMNS = 16, 64
"""Of a product that are compared, drawn at random."""
FINEST = Cast(E4M3, LINE), Cast(E4M3, LINE)
"""Of both operands: what FP8 products are nearest to the exact ones with, whatever the recipe promises."""
COARSEST = Cast(E4M3, TENSOR), Cast(E4M3, TENSOR)
"""What they may be as far off as: one value far beyond the others takes their digits."""
DRAWS = 16
"""Choices of rows and columns that are drawn ahead and taken in turn: on a GPU a draw in each call would wait."""


class WatchedEngine(Protocol):
    """What is needed of the engine whose calls are watched."""

    case: Case
    device: torch.device
    backend: Backend
    model: torch.nn.Module
    calibration_passes: int


class CallWatch:
    """The calls of the FP8 layers in forward passes that train, step by step."""

    def __init__(self, engine: WatchedEngine, compiled: bool, seed: int) -> None:
        watched = not (compiled or engine.backend.brings_model)
        self._layers = {
            name: module
            for name, module in engine.model.named_modules()
            if watched and engine.backend.is_fp8_layer(module)
        }
        # Scales of past steps may not fit a product, which is no fault of it.
        past = engine.calibration_passes
        self._products = [name for name, module in self._layers.items() if not past and is_product(module)]
        self._device, self._draw = engine.device, random.Random(seed)
        self._chosen: set[str] = set()
        self._began: dict[str, int] = {}
        self._now = [0, 0]
        self._calls: list[list[int]] = []
        self._looks: list[tuple[int, str, int]] = []
        """Step, layer, and the number of values of its output."""
        self._norms: list[torch.Tensor] = []
        """Five of each look: of the values' error, of the errors that :data:`FINEST` and :data:`COARSEST` give, of the
        exact values, of the whole output."""
        self._drawn: dict[tuple[int, int], list[torch.Tensor]] = {}

    def next_step(self) -> None:
        """Called before each step of the curve."""
        self._now = [0, 0]
        self._calls.append(self._now)
        self._chosen = set(self._draw.sample(self._products, min(LOOKED_AT, len(self._products))))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around all steps of the curve."""
        handles: list[Any] = []
        for name, module in self._layers.items():
            handles.append(module.register_forward_pre_hook(Hook(self._before(name))))
            handles.append(module.register_forward_hook(Hook(self._after(name)), prepend=True))
        with hooked(handles):
            yield

    def noted(self) -> LayerCalls:
        """What was seen, after the last step."""
        norms = torch.stack(self._norms).view(-1, 5).tolist() if self._norms else []
        found: dict[str, list[Look]] = {}
        for (step, name, values), (wrong, finest, coarsest, exact, made) in zip(self._looks, norms, strict=True):
            # Against the whole output too: rows of small numbers are rounded by the scale of the large ones.
            power = max(exact**2 / (ROWS * COLUMNS), made**2 / values)
            if power:
                error = wrong**2 / (ROWS * COLUMNS) / power
                of_finest = (wrong / finest) ** 2 if finest else 1.0
                of_coarsest = (wrong / coarsest) ** 2 if coarsest else math.inf
                found.setdefault(name, []).append(Look(step, error, of_finest, of_coarsest))
        return LayerCalls([count[0] for count in self._calls], [count[1] for count in self._calls], found)

    def _before(self, name: str) -> Callable[..., None]:
        def before(*_: Any) -> None:
            # What the user compiled may be traced here, and runs without hooks afterwards.
            if not torch.compiler.is_compiling():
                self._began[name] = torch.autograd._get_sequence_nr()

        return before

    def _after(self, name: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            output = output[0] if isinstance(output, tuple) else output
            if not isinstance(output, torch.Tensor) or output.grad_fn is None:
                return
            self._now[not _multiplied_in_fp8(output.grad_fn, self._began[name])] += 1
            if name in self._chosen and args:
                self._look(name, module, args[0], output)

        return after

    def _look(self, name: str, module: torch.nn.Module, given: Any, output: torch.Tensor) -> None:
        self._chosen.discard(name)
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        if weight is None or [type(given), type(weight), type(output)] != _PLAIN:
            return
        if output.is_nested or given.is_nested or not output.numel():
            return
        if (given.shape[-1], output.shape[-1]) != (weight.shape[1], weight.shape[0]):
            return
        with torch.no_grad(), _disable_current_modes(), torch.autocast(self._device.type, enabled=False):
            made = output.detach().reshape(-1, output.shape[-1])
            rows, columns = self._some(len(made), ROWS), self._some(made.shape[1], COLUMNS)
            left, right = given.detach().reshape(-1, given.shape[-1]), weight.detach()
            operands = Operand(left[rows], left.abs().amax()), Operand(right[columns], right.abs().amax())
            added = bias.detach()[columns] if bias is not None and bias.numel() else None
            finest, coarsest = (Expected(*operands, casts, output.dtype, added) for casts in (FINEST, COARSEST))
            exact = finest.exact
            wrong = made.index_select(0, rows).index_select(1, columns).double() - exact
            looked_at = (wrong, finest.own - exact, coarsest.own - exact, exact, made)
            norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in looked_at]
        self._looks.append((len(self._calls) - 1, name, made.numel()))
        self._norms += norms

    def _some(self, size: int, most: int) -> torch.Tensor:
        """At most ``most`` of ``size`` indices, others in each call. Drawn beside torch's own generators."""
        if (size, most) not in self._drawn:
            generator = torch.Generator().manual_seed(size)
            draws = [torch.randint(size, (most,), generator=generator) for _ in range(DRAWS)]
            self._drawn[size, most] = list(torch.stack(draws).to(self._device))
        return self._drawn[size, most][len(self._looks) % DRAWS]


def _multiplied_in_fp8(node: Any, began: int) -> bool:
    """Whether an autograd function of Python's was called since the sequence number ``began``: FP8 libraries multiply
    inside one, and ``torch.nn.functional.linear`` has none. Transformer Engine's notes whether FP8 was on."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction) and getattr(node, "fp8", True):
            return True
        nodes += [n for n, _ in node.next_functions if n is not None and began <= n._sequence_nr() < _ACCUMULATES]
    return False


_PLAIN = [torch.Tensor, torch.nn.Parameter, torch.Tensor]
_ACCUMULATES = 2**63
"""Sequence numbers from here on are those of nodes that accumulate a parameter's gradient."""
