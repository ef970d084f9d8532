"""Notes every call of a module in one step: its owner's name, input, mode; and what entered from outside."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.questions.ledger.differences import OUTSIDE
from pytest_fp8.questions.ledger.evidence import Entered, ModuleCalls, TensorNote
from pytest_fp8.source_text import is_of_a_library
from pytest_fp8.worker.tensors import digests, plain_name
from pytest_fp8.worker.training import zero
from pytest_fp8.worker.training.phases import around_backward
from pytest_fp8.worker.training.restored import followed, hooked, replaced
from pytest_fp8.worker.watch.operators import dtype_name
from pytest_fp8.worker.watch.product_accuracy import is_product
from pytest_fp8.zoo.batch import tensors_in


class ModuleWatch:
    """The calls of all modules, also of those that are no part of the model, as a teacher is.

    ``phase()`` names the phase that is open.
    """

    def __init__(self, model: torch.nn.Module, phase: Callable[[], str]) -> None:
        self._names = {id(module): plain_name(name) for name, module in model.named_modules()}
        self.layers = {plain_name(name): module for name, module in model.named_modules() if is_product(module)}
        """Those of the model that multiply their input by a weight."""
        self.adopted: list[torch.nn.Module] = []
        """Modules that are no part of the model."""
        self._phase = phase
        self.stack: list[str] = []
        self.calls: Counter[ModuleCalls] = Counter()
        self.classes: dict[str, str] = {}
        self.of_torch: set[str] = set()
        """Modules whose class is one of torch's own, or derived from one: a norm with another forward pass, too."""
        self.of_a_library: set[str] = set()
        """Modules whose class, or whose ``forward``, is torch's or another package's: no choice of the user's."""
        self.entered: list[Entered] = []
        self._spans: list[tuple[int, int, str]] = []
        """First and last sequence number of the autograd nodes that a call made, and the module's name."""
        self._nested_spans: list[tuple[int, int, str]] = []
        self._owners: dict[int, str] = {}
        self._thread = threading.get_ident()
        self._backward_depth = 0
        self._outer_stack = 0
        self.on_call: Callable[[str], None] = lambda name: None
        self.on_input: Callable[[str, torch.Tensor, bool], None] = lambda name, tensor, again: None
        """Called with a module's name, its first tensor, and whether the call recomputes."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Not by hooks: the libraries' own hooks and compiled layers are left as they are. Of modules whose ``forward``
        is called directly, those that multiply are seen."""
        original = torch.nn.Module.__call__
        watch = self

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            with watch._call(module, args, kwargs) if watch.of_the_step() else nullcontext():
                return original(module, *args, **kwargs)

        direct = hooked(followed(self.layers.values()))
        self._thread = threading.get_ident()
        with direct, replaced(torch.nn.Module, "__call__", call), around_backward(self._in_backward):
            yield

    def of_the_step(self) -> bool:
        """Whether the thread that asks runs the step, or is one of autograd's that goes backward for it."""
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1

    def counted(self) -> list[ModuleCalls]:
        """The calls; equal ones once, with their number."""
        return [replace(call, count=number) for call, number in self.calls.items()]

    @property
    def recomputing(self) -> bool:
        """Whether a module is being called inside the backward pass."""
        return self._backward_depth > 0 and len(self.stack) > self._outer_stack

    def owner(self) -> str:
        """The module that the operator that runs now belongs to, or :data:`OUTSIDE`; the model's own name is empty."""
        node = torch._C._current_autograd_node() if self._backward_depth else None
        if node is None or len(self.stack) > self._outer_stack:
            return self.stack[-1] if self.stack else OUTSIDE
        number = node._sequence_nr()
        if self._backward_depth > 1:
            return _innermost(self._nested_spans, number)
        if number not in self._owners:
            self._owners[number] = _innermost(self._spans, number)
        return self._owners[number]

    @contextmanager
    def _call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        if id(module) not in self._names:
            self._adopt(module)
        name = self._names[id(module)]
        self._note(name, module, args, kwargs)
        self.stack.append(name)
        start = torch.autograd._get_sequence_nr()
        try:
            yield
        finally:
            spans = self._nested_spans if self._backward_depth else self._spans
            end = torch.autograd._get_sequence_nr()
            if end > start:
                spans.append((start, end, name))
                self._owners.clear()
            self.stack.pop()

    def _adopt(self, module: torch.nn.Module) -> None:
        """Name a module that is no part of the model, and its children."""
        prefix = f"({type(module).__qualname__.rpartition('.')[2]} {len(self.adopted) + 1})"
        # Kept, so that no later module gets the same id.
        self.adopted.append(module)
        for name, child in module.named_modules():
            self._names.setdefault(id(child), f"{prefix}.{name}".rstrip("."))

    def _note(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.on_call(name)
        phase = "recompute" if self._backward_depth else self._phase()
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        first = tensors[0] if tensors else None
        if phase == "forward" and not torch.is_grad_enabled():
            phase = "evaluation"
        outermost = len(self.stack) == (self._outer_stack if self._backward_depth else 0)
        call = ModuleCalls(
            module=name,
            phase=phase,
            shape=shape_of(first) if first is not None else (),
            dtype=dtype_name(first) if first is not None else "",
            training=module.training,
            count=1,
            outermost=outermost,
        )
        self.calls[call] += 1
        if first is not None:
            self.on_input(name, first, phase == "recompute")
        kind = type(module)
        self.classes[name] = f"{kind.__module__}.{kind.__qualname__}"
        if _is_of_torch(kind):
            self.of_torch.add(name)
        # A wrapper, as DDP, has the name of what it calls next. torch.compile's calls the module unseen.
        self.of_a_library.discard(name)
        inner: type = type(getattr(module, "_orig_mod", module))
        if _is_of_torch(inner) or is_of_a_library(next(k.__module__ for k in inner.__mro__ if "forward" in vars(k))):
            self.of_a_library.add(name)
        if outermost and not self._backward_depth:
            given = tuple(_entered(tensor) for tensor in tensors_in((args, kwargs)))
            self.entered.append(Entered(name, phase, module.training, torch.is_grad_enabled(), given))

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Reentrant checkpointing goes backward inside a backward pass, through a graph made in another thread, whose
        sequence numbers begin anew."""
        outer = self._outer_stack
        self._backward_depth += 1
        self._outer_stack = len(self.stack)
        try:
            yield
        finally:
            self._backward_depth -= 1
            self._outer_stack = outer
            if self._backward_depth:
                self._nested_spans.clear()


def _is_of_torch(kind: type) -> bool:
    return any(one.__module__.startswith("torch.nn.") and one not in _WITHOUT_SETTINGS for one in kind.__mro__)


_WITHOUT_SETTINGS = (torch.nn.Module, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
"""Classes of torch's from which users derive modules of every kind."""


def _entered(tensor: torch.Tensor) -> TensorNote:
    """Without a digest where autograd computed it: products round it otherwise in each arm."""
    with _disable_current_modes(), torch.no_grad():
        return TensorNote(shape_of(tensor), dtype_name(tensor), digest_of(tensor) if tensor.grad_fn is None else "")


def _innermost(spans: list[tuple[int, int, str]], number: int) -> str:
    inside = [(end - start, name) for start, end, name in spans if start <= number < end]
    # Of equal spans the first: a call is noted when it ends, so that the innermost comes before what called it.
    return min(inside, key=lambda span: span[0])[1] if inside else OUTSIDE


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A ragged size is -1. Of a parameter that ZeRO-3 holds in parts, the whole one's."""
    return tuple(size if isinstance(size, int) else -1 for size in zero.shape(tensor))


def digest_of(tensor: torch.Tensor) -> str:
    """16 hex digits of a tensor's content; empty for one whose elements are no plain numbers in its own memory."""
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout != torch.strided or tensor.device.type == "meta":
        return ""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_quantized or tensor.is_nested:
        return ""
    return f"{digests({'': tensor})['']:016x}" if tensor.numel() else "0"
