"""Watches an arm from inside: one forward pass with a hook on every Linear, and on a CPU one step's matrix products.

On a CPU (emulated FP8) a dispatch mode sees each operator with its operands, FP8 tensors included. What executes on a
GPU is read from a profile instead: ``profile.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fp8.backends.base import Seen
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.worker.recomputation import checkpointed, straightened, watch_recomputation

OPERANDS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    # One product per expert; the rows of all of them are the left operand's. Where torch has none, transformers does.
    "_grouped_mm": (0, 1),
    "transformers::grouped_mm_fallback": (0, 1),
    "_scaled_mm": (0, 1),
    "_scaled_mm_v2": (0, 1),
}
AGREEMENT_ROWS = 256
"""Rows of a layer's input on which its output is computed again: enough for a mean, cheap beside the layer itself."""
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


# -- the model's own layers -------------------------------------------------------------------------------------------


def observe_forward(
    model: torch.nn.Module,
    originals: dict[str, tuple[int, int]],
    is_fp8_layer: Callable[[torch.nn.Module], bool],
    recipe_in_force: Callable[[torch.nn.Module], dict[str, Any]],
    forward: Callable[[], Any],
    part: Part | None = None,
    watching: Callable[[torch.nn.Module, Seen], AbstractContextManager[Any]] | None = None,
) -> tuple[list[LayerCall], dict[str, dict[str, Any]], dict[str, tuple[float, float]]]:
    """One eager forward pass with a hook on every original Linear.

    Gives the calls in execution order, and per FP8 layer the recipe in force, read inside its forward pass, and how its
    output agrees with the same product in high precision (:func:`output_agreement`). Compiled
    code is bypassed for this one pass, since hooks do not run inside it; what *executes* is read elsewhere, from the
    compiled step.

    ``part``: given where ``forward`` is a whole hand-written step, backward included: which part of it is running. Only
    calls in a forward pass count; one that comes during the backward pass is a recomputation of an earlier one.

    ``watching``: given where the library computes a layer's product without calling the layer: the backend's own
    :meth:`~pytest_fp8.backends.base.Backend.watching`, which stands in for the hooks.
    """
    calls: list[LayerCall] = []
    recipes: dict[str, dict[str, Any]] = {}
    agreement: dict[str, tuple[float, float]] = {}
    unwatched: set[int] = set()
    """Calls without gradients: a target network, an evaluation past the model's own call; or, where the backward pass
    calls the layer again, the first pass of reentrant checkpointing."""
    handles = []

    def note(name: str, module: torch.nn.Module, rows: int, needs_dgrad: bool) -> None:
        fp8 = is_fp8_layer(module)
        if fp8:
            recipes[name] = recipe_in_force(module)
        inputs, outputs = originals[name]
        needs_wgrad = any(p.requires_grad for p in module.parameters() if p.dim() > 1)
        calls.append(
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
                turn=part.turns if part is not None else 0,
            )
        )

    def hook(name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = input_of(args, kwargs)
            if part is not None and part.name != "forward":
                if part.name == "backward":
                    _recomputed(calls, name, tensor.requires_grad)
                return
            if not torch.is_grad_enabled():
                unwatched.add(len(calls))
            note(name, module, tensor.numel() // max(1, tensor.shape[-1]), tensor.requires_grad)

        return before

    def after_hook(name: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if part is not None and part.name != "forward":
                return
            if is_fp8_layer(module) and isinstance(output, torch.Tensor):
                agreement[name] = output_agreement(module, input_of(args, kwargs), output)

        return after

    modules = dict(model.named_modules())
    names = {id(modules[name]): name for name in originals}

    def seen(module: torch.nn.Module, rows: int, sample: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        # Such functions compute the input's gradient whether or not anybody wants it.
        note(names[id(module)], module, rows, needs_dgrad=True)
        if sample is not None:
            agreement[names[id(module)]] = output_agreement(module, *sample)

    for name in originals:
        handles.append(modules[name].register_forward_pre_hook(hook(name), with_kwargs=True))
        handles.append(modules[name].register_forward_hook(after_hook(name), with_kwargs=True))
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if watching is not None:
                # It keeps what it keeps: torch.func, in its loss, refuses the hooks below.
                stack.enter_context(watching(model, seen))
            elif part is None:
                # The graph is wanted for its flags alone, so nothing is kept for a backward pass: an eager 8B forward
                # would hold 40 GiB of activations.
                nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
                stack.enter_context(nothing)
                stack.enter_context(straightened())
            forward()
    finally:
        for handle in handles:
            handle.remove()
    counted = [call for index, call in enumerate(calls) if call.recomputed or index not in unwatched]
    return counted, recipes, agreement


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What a layer is called with: its first tensor, which has another name in each library where it has one."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


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


def _recomputed(calls: list[LayerCall], name: str, needs_dgrad: bool) -> None:
    """Note that the latest call of this layer is recomputed. Reentrant checkpointing runs without gradients at first,
    so that only now it shows which are owed."""
    for index in range(len(calls) - 1, -1, -1):
        call = calls[index]
        if call.name == name and (not call.recomputed or (needs_dgrad and not call.needs_dgrad)):
            calls[index] = replace(call, recomputed=True, needs_dgrad=call.needs_dgrad or needs_dgrad)
            return


@torch.no_grad()
def output_agreement(module: torch.nn.Module, given: torch.Tensor, output: torch.Tensor) -> tuple[float, float]:
    """(gain, SQNR in dB) of a layer's output against ``x . W^T + b`` in float32 on the same input and weights.

    The gain is the least-squares factor between the two: 1 for sound scales, 2 for a scale that is off by two. SQNR is
    ``10 log10(|y|^2 / |y - q|^2)``; about 28 dB for e4m3 operands without outliers.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        return 1.0, float("inf")
    rows = given.detach().reshape(-1, given.shape[-1])[:AGREEMENT_ROWS].float()
    bias = module._parameters.get("bias")
    # Of a weight that is kept in FP8 alone, what remains to compare is the product and how its input was cast.
    dense = weight.detach().dequantize() if hasattr(weight, "qdata") else weight.detach()
    exact = rows @ dense.float().t()
    if bias is not None and bias.numel():
        exact += bias.detach().float()
    seen = output.detach().reshape(-1, output.shape[-1])[:AGREEMENT_ROWS].float()
    power = float(exact.square().sum())
    if power == 0:
        return 1.0, float("inf")
    noise = float((seen - exact).square().sum()) / power
    gain = float((seen * exact).sum()) / power
    return gain, -10 * math.log10(noise) if noise > 0 else float("inf")


# -- on a CPU ---------------------------------------------------------------------------------------------------------


class ProductRecorder(TorchDispatchMode):
    """Records every matrix product of a phase that reaches the dispatcher, with its operands' precision.

    Off in the optimizer's phase: what an optimizer multiplies is no layer's product, and its compiled code runs as it
    is. Elsewhere code that the user compiled runs uncompiled: under such a mode torch does not compile, and
    ``fullgraph=True`` takes that for an error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []
        self.phase = ""
        self._recomputing = 0

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        if name == "optimizer":
            yield
            return
        self.phase = name
        try:
            with torch.compiler.set_stance("force_eager"), self:
                yield
        finally:
            self.phase = ""

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        self._recomputing += 1
        yield
        self._recomputing -= 1

    @contextmanager
    def watching(self, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Tell recomputed products from those of the backward pass: a layer that is called during it is recomputed, as
        is what non-reentrant checkpointing runs."""

        def before(*_: Any) -> None:
            self._recomputing += self.phase == "backward"

        def after(*_: Any) -> None:
            self._recomputing = max(0, self._recomputing - 1)

        handles: list[Any] = []
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(before))
            # always_call: torch ends a recomputation by an exception once it has what it needs.
            handles.append(layer.register_forward_hook(after, always_call=True))
        try:
            with watch_recomputation(self.recomputing):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func._schema.name.removeprefix("aten::")
        if operator in OPERANDS and self.phase:
            left, right = (args[index] for index in OPERANDS[operator])
            phase = RECOMPUTE if self._recomputing else self.phase
            self.products.append(product_of(phase, operator, tuple(left.shape), tuple(right.shape), _kind(left, right)))
        return func(*args, **(kwargs or {}))


def _kind(left: Any, right: Any) -> str:
    """``fp8`` where both operands hold FP8 values; torchao's tensors keep theirs in ``_data``."""
    dtypes = [getattr(operand, "_data", operand).dtype for operand in (left, right)]
    if all(dtype in _FLOAT8 for dtype in dtypes):
        return FP8
    if any(dtype in _FLOAT8 for dtype in dtypes):
        return "mixed"
    return str(dtypes[0]).removeprefix("torch.")


def product_of(
    phase: str, operator: str, left: tuple[int, ...], right: tuple[int, ...], kind: str, kernel: str = ""
) -> Product:
    batch = left[0] if len(left) == 3 else 1
    return Product(phase, left[-1], (left[-2], right[-1]), kind, operator, kernel, batch)
