"""Whether a load reaches what FP8 layers compute with: a copy of a weight that a layer keeps must be renewed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.questions.findings import some
from pytest_fp8.worker.answers.held_out import inputs_of, not_evaluated
from pytest_fp8.worker.state.fused_params import plain_name
from pytest_fp8.worker.state.shards import full, is_plain
from pytest_fp8.worker.training.restored import hooked
from pytest_fp8.worker.training.zero import is_partitioned
from pytest_fp8.worker.watch.product_accuracy import is_product

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

SEED = 0
LINES = 16
"""Rows of the input and of the weight that are compared in each layer: 40 MB of weights at 8B."""
NEARER = 4.0
"""A layer computes with old weights where its output is twice as near to their product as to that of the present ones:
a quarter of the squared error. An FP8 copy is within 10 % of its weight. Unrelated values are as far from one as from
the other: the share of 256 values varies by about a tenth."""


class LoadWatch:
    """Evaluates before a load and after it, and tells by which weights each FP8 layer multiplied.

    Only trained weights count: of a frozen one a copy may be kept for good.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.unchecked = ""
        """Why layers were not looked at, in words; empty where all were."""
        live = {name: module for name, module in engine.model.named_modules() if engine.backend.is_fp8_layer(module)}
        if live and engine.backend.brings_model:
            self.unchecked, live = "the library computes FP8 layers without calling them", {}
        self._layers = {
            name: module
            for name, module in live.items()
            if is_product(module) and _is_trained(module._parameters["weight"])
        }
        self._inputs = inputs_of(engine, SEED) if self._layers else None
        self._before: dict[str, torch.Tensor] = {}
        self._errors: dict[str, torch.Tensor] = {}

    def before(self, own_load: bool = False) -> None:
        """Evaluate with the weights that are there now, which must be far from those that will be loaded.

        ``own_load``: the workload's ``load()`` will load them. Where there is one it may renew copies by itself, so
        ``load_state_dict()`` alone is not asked to.
        """
        own = self._engine.setup.own
        if self._layers and not own_load and own is not None and own.load is not None:
            self.unchecked = "the workload's load() may renew them"
            return
        if self._layers and self._evaluated():
            weights = {name: layer._parameters["weight"] for name, layer in self._layers.items()}
            self._before = {name: _some(full(weight)).detach().clone() for name, weight in weights.items()}

    def stale(self) -> list[str]:
        """Evaluate again: the layers that multiply by other weights than theirs, of :meth:`before` or older ones."""
        if not self._before:
            return []
        handles = [
            self._layers[name].register_forward_hook(self._compare(name), prepend=True, with_kwargs=True)
            for name in self._before
        ]
        with hooked(handles):
            if self._evaluated() and len(self._errors) < len(self._before):
                missed = [plain_name(name) for name in self._before if name not in self._errors]
                self.unchecked = f"an evaluation does not call {some(missed)} with rows of its width"
        if not self._errors:
            return []
        errors = torch.stack(list(self._errors.values())).tolist()
        return [plain_name(name) for name, row in zip(self._errors, errors, strict=True) if _is_stale(*row)]

    def _evaluated(self) -> bool:
        # A forward pass may put another tensor in a weight's place: param.data = ...
        # Not one that ZeRO-3 gathers and frees by itself.
        plain = (p for p in self._engine.model.parameters() if type(p.data) is torch.Tensor and not is_partitioned(p))
        held = [(parameter, parameter.data) for parameter in plain]
        error = not_evaluated(self._engine, self._inputs, set(self._layers.values()).__contains__)
        for parameter, data in held:
            if parameter.data.data_ptr() != data.data_ptr():
                parameter.data = data
        if error is not None:
            why = error or ("it has no room" if self._inputs else "the step or loss does not call the whole model")
            self.unchecked = f"no evaluation of the model: {why}"
        return error is None

    def _compare(self, name: str) -> Callable[..., None]:
        def compare(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
            given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
            if name in self._errors or given is None or weight is None or type(output) is not torch.Tensor:
                return
            if (output.shape[-1], given.shape[-1]) != weight.shape:
                return
            with torch.enable_grad():
                trained = layer.forward(*args, **kwargs).detach()
            rows = _some(given.reshape(-1, given.shape[-1])).double()
            biased = _some(bias).double() if bias is not None and bias.numel() else 0.0
            new, old = (rows @ w.double().t() + biased for w in (_some(weight), self._before[name]))
            seen, trained = (_some(_some(y.reshape(-1, y.shape[-1])).t()).t().double() for y in (output, trained))
            errors = [seen - new, seen - old, trained - new, new]
            self._errors[name] = torch.stack([error.square().sum() for error in errors])

        return compare


def _is_stale(new: float, old: float, trained: float, power: float) -> bool:
    """Squared errors of a layer's evaluation against the product with its weights and with those of before; of the same
    call with gradients, as in training; and the product's own power.

    It is stale where it is nearer to the old weights; or where it is farther from its own than nothing is, and with
    gradients is not: a copy that is older, for evaluations alone.
    """
    return NEARER * old < new or (new > power and NEARER * trained < new)


def _is_trained(weight: torch.nn.Parameter | None) -> bool:
    """Whether it is a plain tensor, or plain in its shards, and trained."""
    return weight is not None and is_plain(weight) and weight.requires_grad and weight.dtype.itemsize > 1


def _some(lines: torch.Tensor) -> torch.Tensor:
    """:data:`LINES` of them, from all over."""
    picked = torch.linspace(0, len(lines) - 1, min(LINES, len(lines)), device=lines.device).long()
    return lines[picked]
