"""Watches a step: samples of each FP8 layer's products, forward and backward, beside the exact ones of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.casts import GRADIENT, INPUT, SQUARE, WEIGHT, Casts, promised_casts
from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD, Role
from pytest_fp8.worker.state.shards import full, is_plain, is_sharded
from pytest_fp8.worker.training.restored import followed, hooked
from pytest_fp8.worker.watch.product_accuracy import (
    STATISTICS,
    Expected,
    Operand,
    decibels,
    is_product,
    kept_numbers,
    square_amax,
)

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

LINES = 128
"""Rows and columns of a product that are compared, beside both ends. For the weight gradient each call keeps as many
columns of its input: 1 MB a layer at 8B."""
CALLS = 32
"""Calls of one layer that are compared in a step."""


@dataclass
class _Call:
    """One call of a layer, while it runs and until its gradients have come."""

    name: str
    role: Role
    given: torch.Tensor
    weight: torch.Tensor
    parameter: torch.nn.Parameter | None = None
    """The weight that a view stands in for while the call runs."""
    columns: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    lines: Operand | None = None
    """Of the weight, for dgrad, where it may be gone before the backward pass."""
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the layer multiplied its input and weight by, where it knew that before."""
    expected: dict[Role, Expected] = field(default_factory=dict)


class ProductWatch:
    """An observer of :func:`instrumented_step`: hooks on the FP8 layers, or in the reference on all Linears.

    A layer's input and weight are handed to it as views, whose gradients are this call's own: not the sum over the
    layers that share an input, nor over the calls of a layer, nor with a penalty on the weight.
    """

    def __init__(self, engine: Engine) -> None:
        case, backend = engine.case, engine.backend
        self._engine = engine
        self._casts: Casts = promised_casts(case.backend, case.recipe, case.full_options)
        modules = dict(engine.model.named_modules())
        names = engine.originals if case == case.reference() else modules
        self.layers = {
            name: modules[name]
            for name in names
            if (case == case.reference() or backend.is_fp8_layer(modules[name])) and is_product(modules[name])
        }
        """Those whose products can be seen: none under ZeRO-3, which holds no whole weight between steps."""
        self._names = {id(module): name for name, module in self.layers.items()}
        self._phase = ""
        self._open: list[_Call] = []
        self._made: list[_Call] = []
        self._calls: dict[str, int] = {}
        self._found: list[tuple[str, Role, torch.Tensor]] = []
        self._indices: dict[int, torch.Tensor] = {}
        self._gathered: dict[str, dict[Role, Operand]] = {}
        """Layer whose weight FSDP2 gathers in FP8 -> lines of the weight as it is before that."""
        self._scales: dict[str, dict[str, torch.Tensor]] = {}
        """Layer -> the scales of its last forward pass, which a recomputation uses again."""
        self._own_scales: set[str] = set()
        """Layers that keep numbers beside weight and bias which a watched step changed."""
        self.on_wgrad: Callable[[str, torch.Tensor | None], None] | None = None
        """Called with the layer and what is compared of one call's weight gradient; ``None``: it was not seen."""

    # -- the observer -----------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._gathered = {
            name: self._lines_of(full(weight))
            for name, module in self.layers.items()
            if (weight := module._parameters["weight"]) is not None and is_sharded(weight) and not is_plain(weight)
        }
        kept = {name: kept_numbers(module) for name, module in self.layers.items()}
        handles = followed(self.layers.values())
        for name, module in self.layers.items():
            handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            # Before other hooks, which may change the output. Always, because an early end of a recomputation is an
            # exception, and the weight must be put back.
            handles.append(module.register_forward_hook(self._after, prepend=True, always_call=True))
        backend = self._engine.backend
        fused: AbstractContextManager[Any] = (
            backend.watch_fused_functions(self._engine.model, self._note_fused)
            if backend.brings_model
            else nullcontext()
        )
        try:
            with hooked(handles), fused:
                yield
        finally:
            self._own_scales |= {name for name, module in self.layers.items() if kept[name] != kept_numbers(module)}
            # Autograd's hooks and the calls hold each other, and with them operands.
            for call in self._made:
                vars(call).update(given=None, weight=None, lines=None, columns=None, expected={})
            self._made, self._gathered, self._scales = [], {}, {}

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        outer, self._phase = self._phase, name
        yield
        self._phase = outer

    def checks(self) -> list[dict[str, Any]]:
        """What was found, in the order of the products."""
        if not self._found:
            return []
        rows = torch.stack([statistics for _, _, statistics in self._found]).tolist()
        found = []
        for (name, role, _), row in zip(self._found, rows, strict=True):
            told = dict(zip(STATISTICS, row, strict=True))
            noise, own_noise = told.pop("noise"), told.pop("own_noise")
            told["values"] = int(told["values"])
            told |= {"sqnr": decibels(noise), "own_sqnr": decibels(own_noise), "own_scales": name in self._own_scales}
            found.append({"layer": name, "role": role, **told})
        return found

    # -- hooks ------------------------------------------------------------------------------------------------------

    def _before(self, name: str) -> Callable[..., Any]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module is not self.layers[name]:
                return None
            given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if given is None or type(given) not in (torch.Tensor, torch.nn.Parameter) or not given.numel():
                self._open.append(_Call(name, "", torch.empty(0), torch.empty(0)))
                return None
            view = given.view_as(given)
            weight = module._parameters["weight"]
            assert weight is not None
            role = RECOMPUTE if self._phase == "backward" else FPROP
            call = _Call(name, "" if self._phase == EVALUATION else role, view, weight)
            if torch.is_grad_enabled() and weight.requires_grad and _can_be_viewed(weight):
                call.parameter = weight
                call.weight = weight.view_as(weight)
                module._parameters["weight"] = call.weight
            self._open.append(call)

            def replaced(value: Any) -> Any:
                return view if value is given else value

            return tuple(map(replaced, args)), {key: replaced(value) for key, value in kwargs.items()}

        return before

    def __deepcopy__(self, memo: dict[int, Any]) -> ProductWatch:
        """A step may copy the model, hooks and all. What calls the copy is no call of these layers."""
        return self

    def _after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if id(module) not in self._names:
            return
        call = self._open.pop()
        if call.parameter is not None:
            module._parameters["weight"] = call.parameter
        self._calls[call.name] = self._calls.get(call.name, 0) + 1
        weight = call.weight
        if not call.role or type(output) is not torch.Tensor or self._calls[call.name] > CALLS:
            return
        if (call.given.shape[-1], output.shape[-1]) != (weight.shape[1], weight.shape[0]):
            return
        with torch.no_grad(), _disable_current_modes():
            if call.role == FPROP:
                self._scales[call.name] = operand_scales(self._engine, module)
            call.scales = self._scales.get(call.name, {})
            self._compare_fprop(call, output, module._parameters.get("bias"))
        if not output.requires_grad or not torch.is_grad_enabled():
            return
        if self._engine.case.gpus > 1:
            # Where a block ends with its Linear, FSDP2 gathers the weight only after the gradient of its output came.
            with torch.no_grad(), _disable_current_modes():
                call.lines = self._weight(call, self._some(weight.shape[1]), DGRAD)
        self._made.append(call)
        output.register_hook(lambda gradient: self._gradient_came(call, gradient))
        if call.given.requires_grad:
            call.given.register_hook(lambda gradient: self._compare(call, DGRAD, gradient))
        if call.parameter is not None:
            with torch.no_grad(), _disable_current_modes():
                rows = call.given.detach().reshape(-1, weight.shape[1])
                call.columns = rows[:, self._some(weight.shape[1])].clone()
                call.amax = rows.abs().amax()
            call.weight.register_hook(lambda gradient: self._compare(call, WGRAD, gradient))
        # The saved tensors of the layer hold its input; this record must not.
        call.given = call.given.new_empty(0)

    def _compare_fprop(self, call: _Call, output: torch.Tensor, bias: torch.Tensor | None) -> None:
        given = call.given.detach().reshape(-1, call.given.shape[-1])
        rows, outs = self._some(len(given)), self._some(output.shape[-1])
        expected = Expected(
            Operand(given[rows], given.abs().amax(), scale=call.scales.get(INPUT)),
            self._weight(call, outs, FPROP),
            self._casts.get(FPROP),
            output.dtype,
            bias.detach()[outs] if bias is not None and bias.numel() else None,
        )
        seen = output.detach().reshape(-1, output.shape[-1])[rows][:, outs]
        self._found.append((call.name, call.role, expected.compare(seen)))

    def _gradient_came(self, call: _Call, gradient: torch.Tensor) -> None:
        """The output's gradient is there: what the layer's two gradients should be can be computed."""
        with torch.no_grad(), _disable_current_modes():
            gradient = gradient.detach().reshape(-1, gradient.shape[-1])
            amax = gradient.abs().amax()
            rows = self._some(len(gradient))
            weight = call.lines or self._weight(call, self._some(call.weight.shape[1]), DGRAD)
            scale = operand_scales(self._engine, self.layers[call.name]).get(GRADIENT)
            left = Operand(gradient[rows], amax, scale=scale)
            call.expected[DGRAD] = Expected(left, weight, self._casts.get(DGRAD), gradient.dtype)
            if call.columns is None or call.amax is None:
                return
            outs = self._some(gradient.shape[1])
            left = Operand(gradient[:, outs].t(), amax, scale=scale)
            right = Operand(call.columns.t(), call.amax, scale=call.scales.get(INPUT))
            call.expected[WGRAD] = Expected(left, right, self._casts.get(WGRAD), gradient.dtype)
            call.columns = None

    def _compare(self, call: _Call, role: Role, seen: torch.Tensor | None) -> None:
        expected = call.expected.pop(role, None)
        if (expected is None or seen is None) and role == WGRAD and self.on_wgrad is not None:
            self.on_wgrad(call.name, None)
        # A layer that adds to its weight's gradient by itself gives none: the parameter's is compared with BF16's.
        if expected is None or seen is None:
            return
        with torch.no_grad(), _disable_current_modes():
            seen = seen.detach().reshape(-1, seen.shape[-1])
            compared = self.sample_of(seen)
            self._found.append((call.name, role, expected.compare(compared)))
            if role == WGRAD and self.on_wgrad is not None:
                self.on_wgrad(call.name, compared)

    def sample_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The rows and columns of a matrix that are compared of a product."""
        return matrix[self._some(matrix.shape[0])][:, self._some(matrix.shape[1])]

    def _note_fused(self, module: torch.nn.Module, _: int, sample: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """A product of a library's function that does not call the layer (Unsloth): its forward product alone."""
        name = self._names.get(id(module))
        weight = module._parameters.get("weight")
        if name is None or sample is None or weight is None or self._phase == EVALUATION:
            return
        with torch.no_grad(), _disable_current_modes():
            given, output = sample
            self._compare_fprop(_Call(name, FPROP, given, weight), output, None)

    # -- operands ---------------------------------------------------------------------------------------------------

    def _weight(self, call: _Call, lines: torch.Tensor, role: Role) -> Operand:
        """Some lines of the weight along the inner dimension: rows in fprop, columns in dgrad."""
        if call.name in self._gathered:
            return self._gathered[call.name][role]
        # A weight that is kept in FP8 only (Unsloth, quantized_model_init): its values as they are.
        quantized = _is_quantized(call.weight)
        dense = call.weight.detach().dequantize() if quantized else call.weight.detach()
        dense = dense if role == FPROP else dense.t()
        casts = self._casts.get(role)
        squares = None
        if casts is not None and casts[1].scales == SQUARE:
            squares = square_amax(dense)[torch.div(lines, 128, rounding_mode="floor")]
        return Operand(dense[lines], dense.abs().amax(), squares, None if quantized else call.scales.get(WEIGHT))

    def _lines_of(self, weight: torch.Tensor) -> dict[Role, Operand]:
        rows, columns = self._some(weight.shape[0]), self._some(weight.shape[1])
        amax = weight.abs().amax()
        return {FPROP: Operand(weight[rows], amax), DGRAD: Operand(weight.t()[columns], amax)}

    def _some(self, size: int) -> torch.Tensor:
        """All of ``size`` indices; of more than :data:`LINES` as many at random, since a regular choice could miss a
        regular fault, and both ends: a kernel's last tile is often a part of one."""
        if size not in self._indices:
            drawn = torch.arange(size)
            if size > LINES:
                generator = torch.Generator().manual_seed(size)
                ends = torch.tensor([0, size - 1])
                drawn = torch.cat([torch.randint(size, (LINES,), generator=generator), ends]).unique()
            self._indices[size] = drawn.to(self._engine.device)
        return self._indices[size]


def _is_quantized(weight: torch.Tensor) -> bool:
    return hasattr(weight, "qdata") or "Float8Tensor" in type(weight).__name__ or "Quantized" in type(weight).__name__


def _can_be_viewed(weight: torch.Tensor) -> bool:
    """Plain parameters, and torchao's for FSDP2, of which a view is one of them."""
    return type(weight) is torch.nn.Parameter or "WeightWithDynamicFloat8" in type(weight).__name__


def operand_scales(engine: Engine, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the scales that this FP8 layer already has for its operands."""
    kept = engine.backend.scaling(layer)
    return {operand: scale.clone() for operand, scale in kept.operands.items()} if kept is not None else {}
