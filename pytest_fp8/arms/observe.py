"""Watches one training step from inside an arm and writes down every matrix product that was executed.

Two ways, by where the arm runs. On a GPU the profiler sees operators with shapes and types, and the kernels each one
launched; Transformer Engine's products, which pass through no torch operator, are wrapped in a profiler range. On a CPU
(emulated FP8) a dispatch mode sees each operator with its operands, FP8 tensors included.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fp8.evidence.products import FP8, LayerCall, Product

PHASE = "fp8 phase: "
TE_RANGE = "fp8 te product: "

_OPERANDS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1), "_scaled_mm_v2": (0, 1)}
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


# -- the model's own layers -------------------------------------------------------------------------------------------


def observe_forward(
    model: torch.nn.Module,
    originals: dict[str, tuple[int, int]],
    is_fp8_layer: Callable[[torch.nn.Module], bool],
    recipe_in_force: Callable[[torch.nn.Module], dict[str, Any]],
    forward: Callable[[], Any],
) -> tuple[list[LayerCall], dict[str, dict[str, Any]]]:
    """One eager forward pass with a hook on every original Linear.

    Gives the calls in execution order, and per FP8 layer the recipe in force, read inside its forward pass. Compiled
    code is bypassed for this one pass, since hooks do not run inside it; what *executes* is read elsewhere, from the
    compiled step.
    """
    calls: list[LayerCall] = []
    recipes: dict[str, dict[str, Any]] = {}
    handles = []

    def hook(name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            fp8 = is_fp8_layer(module)
            if fp8:
                recipes[name] = recipe_in_force(module)
            inputs, outputs = originals[name]
            calls.append(
                LayerCall(
                    name=name,
                    in_features=inputs,
                    out_features=outputs,
                    rows=tensor.numel() // max(1, tensor.shape[-1]),
                    needs_dgrad=tensor.requires_grad,
                    needs_wgrad=any(p.requires_grad for p in module.parameters() if p.dim() > 1),
                    fp8=fp8,
                )
            )

        return before

    modules = dict(model.named_modules())
    for name in originals:
        handles.append(modules[name].register_forward_pre_hook(hook(name), with_kwargs=True))
    try:
        with torch.compiler.set_stance("force_eager"):
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls, recipes


# -- on a CPU ---------------------------------------------------------------------------------------------------------


class ProductRecorder(TorchDispatchMode):
    """Records every matrix product that reaches the dispatcher, with its operands' precision."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []
        self.phase = ""

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        self.phase = name
        yield
        self.phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func._schema.name.removeprefix("aten::")
        if operator in _OPERANDS and self.phase:
            left, right = (args[index] for index in _OPERANDS[operator])
            self.products.append(_product(self.phase, operator, tuple(left.shape), tuple(right.shape), _kind(left, right)))
        return func(*args, **(kwargs or {}))


def _kind(left: Any, right: Any) -> str:
    """``fp8`` where both operands hold FP8 values; torchao's tensors keep theirs in ``_data``."""
    dtypes = [getattr(operand, "_data", operand).dtype for operand in (left, right)]
    if all(dtype in _FLOAT8 for dtype in dtypes):
        return FP8
    if any(dtype in _FLOAT8 for dtype in dtypes):
        return "mixed"
    return str(dtypes[0]).removeprefix("torch.")


def _product(
    phase: str, operator: str, left: tuple[int, ...], right: tuple[int, ...], kind: str, kernel: str = ""
) -> Product:
    batch = left[0] if len(left) == 3 else 1
    return Product(phase, left[-1], (left[-2], right[-1]), kind, operator, kernel, batch)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def profile_step(step: Callable[[Callable[[str], Any]], Any]) -> dict[str, Any]:
    """One profiled step: its products, the GEMM kernels without an operator, the attention operators and kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with watch_transformer_engine(), torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step(lambda name: torch.profiler.record_function(PHASE + name))
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    return read_profile(profiler.profiler.kineto_results.events())


def read_profile(events: list[Any]) -> dict[str, Any]:
    """Products of the profiled step from the profiler's raw events."""
    on_gpu = torch.autograd.DeviceType.CUDA
    kernels: dict[int, list[Any]] = {}
    host: list[Any] = []
    for event in events:
        if event.device_type() == on_gpu:
            kernels.setdefault(event.linked_correlation_id(), []).append(event)
        else:
            host.append(event)
    host.sort(key=lambda e: (e.start_ns(), -e.duration_ns()))
    phases = [
        (e.name().removeprefix(PHASE), e.start_ns(), e.start_ns() + e.duration_ns())
        for e in host
        if e.name().startswith(PHASE)
    ]

    def phase_of(event: Any) -> str:
        return next((name for name, start, end in phases if start <= event.start_ns() < end), "")

    products: list[Product] = []
    attention: dict[str, set[str]] = {}
    inside: dict[int, int] = {}
    for event in host:
        name, thread = event.name(), event.start_thread_id()
        operator = name.removeprefix("aten::")
        end = event.start_ns() + event.duration_ns()
        launched = [k for k in kernels.get(event.correlation_id(), []) if not _is_copy(k.name())]
        if "scaled_dot_product" in name or "attention" in name.lower():
            if launched:
                attention.setdefault(operator, set()).update(kernel_family(k.name()) for k in launched)
            continue
        if event.start_ns() < inside.get(thread, 0):
            continue
        if name.startswith(TE_RANGE):
            inside[thread] = end
            layout, left, right, kind = name.removeprefix(TE_RANGE).split("|")
            inner, outer = te_extents(layout, _shape(left), _shape(right))
            kernel = longest(launched)
            products.append(Product(phase_of(event), inner, outer, kind, f"te.{layout}", kernel))
        elif operator in _OPERANDS and name.startswith("aten::"):
            inside[thread] = end
            one, two = _OPERANDS[operator]
            shapes, dtypes = event.shapes(), event.dtypes()
            kinds = {"Float8" in dtypes[index] for index in (one, two)}
            kind = FP8 if kinds == {True} else "mixed" if len(kinds) == 2 else _dtype_name(dtypes[one])
            products.append(
                _product(phase_of(event), operator, tuple(shapes[one]), tuple(shapes[two]), kind, longest(launched))
            )
    gpu_times: dict[str, int] = {}
    for group in kernels.values():
        for kernel in group:
            gpu_times[kernel.name()] = gpu_times.get(kernel.name(), 0) + kernel.duration_ns()
    return {
        "products": products,
        "attention": {name: sorted(families) for name, families in attention.items()},
        "kernels": gpu_times,
    }


def longest(launched: list[Any]) -> str:
    """The kernel that took the most time: a product may be accompanied by a split-K reduction or a fill."""
    return str(max(launched, key=lambda k: k.duration_ns()).name()) if launched else ""


def _is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))


def _dtype_name(text: str) -> str:
    return {"c10::BFloat16": "bfloat16", "float": "float32", "c10::Half": "float16"}.get(text, text)


def kernel_family(name: str) -> str:
    """A kernel's name without its tile sizes, so that two sizes of one algorithm compare equal.

    >>> kernel_family("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT")
    'nvjet_sm90_qqtst'
    """
    name = re.sub(r"^void ", "", name)
    name = re.split(r"[<(]", name)[0]
    return re.split(r"_(?:\d+x\d+|tilesize)", name)[0]


# -- Transformer Engine -----------------------------------------------------------------------------------------------


@contextmanager
def watch_transformer_engine() -> Iterator[None]:
    """Wrap Transformer Engine's ``general_gemm`` in a profiler range that names layout, shapes and precision.

    It calls cuBLASLt without a torch operator, so that without this its products have kernels but no shapes.
    """
    patched: list[tuple[Any, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and callable(getattr(module, "general_gemm", None)):
            patched.append((module, module.general_gemm))
    wrappers: dict[Any, Any] = {}
    for module, original in patched:
        module.general_gemm = wrappers.setdefault(original, _watched(original))
    try:
        yield
    finally:
        for module, original in patched:
            module.general_gemm = original


def _watched(general_gemm: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        quantized = [not isinstance(operand, torch.Tensor) or "Float8" in type(operand).__name__ for operand in (a, b)]
        kind = FP8 if all(quantized) else "mixed" if any(quantized) else str(a.dtype).removeprefix("torch.")
        label = "|".join([kwargs.get("layout", "TN"), _text(a), _text(b), kind])
        with torch.profiler.record_function(TE_RANGE + label):
            return general_gemm(a, b, *args, **kwargs)

    return wrapper


def te_extents(layout: str, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, tuple[int, int]]:
    """Inner and outer extents of ``general_gemm(A, B, layout)``, shapes as row-major tensors flattened to two dims.

    TN is fprop (A the weight [N, K], B the input [M, K]); NN is dgrad (A the weight, B the output's gradient [M, N]);
    NT is wgrad (A the input, B the output's gradient).
    """
    if layout == "TN":
        return a[-1], (a[0], b[0])
    if layout == "NN":
        return a[0], (b[0], a[-1])
    return a[0], (b[-1], a[-1])


def _text(operand: Any) -> str:
    size = operand.size() if callable(getattr(operand, "size", None)) else operand.shape
    dims = [int(n) for n in size]
    rows = 1
    for n in dims[:-1]:
        rows *= n
    return f"{rows}x{dims[-1]}"


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))
