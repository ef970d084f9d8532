"""Records the matrix products of one training step on a CPU (emulated FP8), operands' precision included.

On a GPU they are read from a profile: ``profile.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.worker.operators import OPERANDS, operand_formats, product_of
from pytest_fp8.worker.recomputation import watch_recomputation

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


class ProductRecorder(TorchDispatchMode):
    """Records every matrix product that reaches the dispatcher in the forward, backward and evaluation phases.

    It is off in the optimizer's phase: an optimizer's products belong to no layer, and its compiled code runs as it is.
    In the other phases code that the user compiled runs uncompiled: torch does not compile under such a mode, and
    ``fullgraph=True`` would raise an error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []
        self.phase = ""
        self._recomputing = 0

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Record what runs inside as products of the phase ``name``."""
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
    def watching(self, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Tell recomputed products from those of the backward pass. A layer that is called during the backward pass is
        recomputed, as is what non-reentrant checkpointing runs."""

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
            with watch_recomputation(self._recomputation):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        self._recomputing += 1
        yield
        self._recomputing -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func._schema.name.removeprefix("aten::")
        if operator in OPERANDS and self.phase:
            left, right = (args[index] for index in OPERANDS[operator])
            phase = RECOMPUTE if self._recomputing else self.phase
            product = product_of(phase, operator, tuple(left.shape), tuple(right.shape), _kind(left, right))
            self.products.append(replace(product, formats=operand_formats(*map(_dtype_name, (left, right)))))
        return func(*args, **(kwargs or {}))


def _dtype_name(operand: Any) -> str:
    return str(getattr(operand, "_data", operand).dtype)


def _kind(left: Any, right: Any) -> str:
    """``fp8`` where both operands hold FP8 values (torchao's tensors keep theirs in ``_data``), ``mixed`` where one
    does, else the left operand's dtype."""
    dtypes = [getattr(operand, "_data", operand).dtype for operand in (left, right)]
    if all(dtype in _FLOAT8 for dtype in dtypes):
        return FP8
    if any(dtype in _FLOAT8 for dtype in dtypes):
        return "mixed"
    return str(dtypes[0]).removeprefix("torch.")
