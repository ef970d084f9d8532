"""Records one uncompiled step as a table: all calls of modules and all operators, by owner and phase."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_fp8.backends.base import Backend
from pytest_fp8.questions.layers.products import EVALUATION, Product
from pytest_fp8.questions.ledger.evidence import OUTSIDE, Entered, TensorNote
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.source_text import is_of_a_library
from pytest_fp8.worker.notes import digest_of, random_state, shape_of
from pytest_fp8.worker.record.accuracy import is_product
from pytest_fp8.worker.record.libraries import te_product, watch_recomputation, watch_transformer_engine
from pytest_fp8.worker.record.operators import OPERANDS, dtype_name, products_of_call
from pytest_fp8.worker.record.trace import SPACES, kind_of
from pytest_fp8.worker.tensors import plain_name, unwatched
from pytest_fp8.worker.training.restored import followed, hooked
from pytest_fp8.worker.training.step import around_backward
from pytest_fp8.zoo.batch import tensors_in

Size = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor."""
Span = tuple[int, int, int]
"""First and last sequence number of the autograd nodes that a call made, and the call's index."""


@dataclass(slots=True)
class Call:
    """One call of a module."""

    module: str
    """Its plain name; of a module that is no part of the model a name in brackets."""
    kind: str
    """Module and name of its class."""
    phase: str
    """``forward``, ``recompute``, or ``evaluation`` where autograd records nothing."""
    part: str
    """The part of the step: ``forward``, ``backward`` or ``evaluation``."""
    tensors: Sequence[Size]
    """Its arguments that are tensors."""
    given: int
    """Equal for calls whose first tensor is the same: the number of the autograd node that made it; of what no node
    made, a negative one. :data:`NOTHING` without a tensor."""
    training: bool
    outermost: bool
    """Whether no other module called it."""
    inside: int
    """Index of the call that made it, or -1."""
    needs_dgrad: bool
    """Whether its first tensor requires a gradient."""
    needs_wgrad: bool
    """Whether a matrix among its own weights does."""
    fp8: bool
    """Whether it is one of the backend's FP8 layers."""
    of_library: bool
    """Whether its class is torch's or derived from one of torch's, or its ``forward`` another package's."""
    reached: bool = False
    """Whether the backward pass goes through what it made."""


@dataclass(slots=True)
class Event:
    """One operator, or one product that a library computes without an operator."""

    phase: str
    """``forward``, ``backward``, ``recompute`` or ``evaluation``."""
    call: int
    """Index of the innermost call that it belongs to; -1: code outside all modules."""
    operator: str
    shape: Sequence[int]
    """Of what it gave, or where it gave nothing, of what it was given."""
    dtype: str = "nothing"
    """Of what it gave."""
    products: Sequence[Product] = ()
    weight: str = ""
    """The layer whose weight it multiplies by code of its caller's, where autograd records that: not a library's
    function. Inside a layer's own call only that layer's."""
    numbers: Sequence[float] = ()
    words: Sequence[str] = ()
    """Numbers and words among its arguments."""
    counted: bool = False
    """Whether it is compared between the arms by its number: no view, no copy, no library's own."""
    waits: bool = False
    """Whether the host waits for its value, by which it may decide."""
    chooses: bool = False
    """Whether the number of rows that it gave follows from content."""
    state: str = ""
    """Digest of the generators' state before it, where it drew from them."""
    bytes: int = 0
    """Of a collective: those of its largest tensor, whose shape and dtype are told."""

    @property
    def told(self) -> bool:
        """Whether it says anything: a view or a copy does not."""
        return bool(self.counted or self.waits or self.chooses or self.state or self.bytes or self.products)


@dataclass
class StepTable:
    """One step of one rank."""

    calls: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    entered: list[Entered] = field(default_factory=list)
    """The outermost calls, with digests of what entered."""
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """FP8 layer -> the recipe in force, read inside its forward pass."""
    watched: bool = True
    """Whether operators were noted. Not where a library brings compiled code that refuses it."""

    def owner(self, event: Event) -> str:
        """The module that an operator belongs to; the model's own name is empty."""
        return self.calls[event.call].module if event.call >= 0 else OUTSIDE


READ = "_local_scalar_dense"
"""What ``.item()``, ``float(tensor)`` and ``if tensor:`` call: the host waits for the value."""
VIEWS = """
    view _unsafe_view reshape expand t transpose permute unsqueeze squeeze select slice split split_with_sizes unbind
    as_strided alias detach detach_ lift_fresh chunk narrow unfold diagonal view_as_real view_as_complex _reshape_alias
    movedim flatten"""
"""What carries no arithmetic depends on how a layer lays out its output."""
COPIES = """
    clone contiguous _to_copy copy_ _copy_from empty empty_like empty_strided new_empty new_empty_strided zeros
    zeros_like ones ones_like full full_like new_zeros new_ones new_full scalar_tensor zero_ fill_ set_ resize_
    is_same_size record_stream pin_memory"""
NOTHING = -1
"""The source of a call that is given no tensor."""
CASTS = ("_to_copy", "copy_")
"""Copies that round where they give FP8 values. In the backward pass they are counted. Forward, and after the step, a
user's own FP8 casts what several layers are given, or its weights once for all micro-batches."""
NOT_COUNTED = {*VIEWS.split(), *COPIES.split(), READ}
MARKS = "profiler::"
"""Of what torch sets around an optimizer's step."""
SHARDING = f"{os.sep}torch{os.sep}distributed{os.sep}fsdp{os.sep}"
"""FSDP2's own copies, which differ where weights are gathered in FP8."""
LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("transformer_engine", "torchao", "accelerate"))
"""Folders of the libraries that switch FP8 on."""
TORCH = f"{os.sep}torch{os.sep}"


class StepRecorder(TorchDispatchMode):
    """An observer of a step that runs uncompiled: fills :class:`StepTable`.

    Operators are noted in the forward, backward and evaluation parts; the mode is off in the optimizer's part, whose
    compiled code runs as it is. ``linears``: the layers whose calls are told by role, by their live names.
    """

    def __init__(
        self, model: torch.nn.Module, backend: Backend | None = None, linears: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = StepTable(watched=backend is None or not backend.brings_model)
        self.layers = {plain_name(name): module for name, module in model.named_modules() if is_product(module)}
        """Those of the model that multiply their input by a weight."""
        self._adopted: list[torch.nn.Module] = []
        """Modules that were called and are no part of the model."""
        self.on_first_call: Callable[[], None] = lambda: None
        """Called when the first module is called in the forward part."""
        self.part = ""
        """The part of the step that runs now; empty outside."""
        self._model, self._backend = model, backend
        modules = dict(model.named_modules())
        self._linears = {plain_name(name): modules[name] for name in linears or ()}
        self._names = {id(module): plain_name(name) for name, module in model.named_modules()}
        self._leaves: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._numbers = itertools.count(NOTHING - 1, -1)
        self._stack: list[int] = []
        """Indices of the calls that run."""
        self._levels: list[tuple[int, list[Span]]] = [(0, [])]
        """Of the step, and of each backward pass that runs inside another: how many calls ran when it began, and the
        spans of those that it made."""
        self._thread = threading.get_ident()
        self._recomputing = 0

    # -- the observer -------------------------------------------------------------------------------------------------

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        if name == "optimizer":
            yield
            return
        outer, self.part = self.part, name
        try:
            with torch.compiler.set_stance("force_eager"), self if self.table.watched else nullcontext():
                yield
        finally:
            self.part = outer

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the modules' calls, what checkpointing recomputes, and Transformer Engine's products.

        Calls are not followed by hooks: the libraries' own hooks and compiled layers are left as they are. Of modules
        whose ``forward`` is called directly, those that multiply are seen.
        """
        original, recorder = torch.nn.Module.__call__, self

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not recorder._of_the_step():
                return original(module, *args, **kwargs)
            with recorder._call(module, args, kwargs):
                return original(module, *args, **kwargs)

        self._thread = threading.get_ident()
        with ExitStack() as stack:
            stack.enter_context(hooked(followed({*self.layers.values(), *self._linears.values()})))
            stack.enter_context(patch.object(torch.nn.Module, "__call__", call))
            stack.enter_context(around_backward(self._backward_pass))
            stack.enter_context(watch_recomputation(self._recomputation))
            stack.enter_context(watch_transformer_engine(self._note_te))
            if self._backend is not None:
                stack.enter_context(self._backend.watch_fused_functions(self._model, self._note_fused))
            yield

    # -- calls --------------------------------------------------------------------------------------------------------

    def _of_the_step(self) -> bool:
        """Whether the thread that asks runs the step, or is one of autograd's that goes backward for it."""
        # Private: torch has no public way to ask which backward pass runs.
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1

    @contextmanager
    def _call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if self.part == "forward" and not any(each.part == "forward" for each in self.table.calls):
            self.on_first_call()
        call = self._note_call(module, tensors)
        if call.outermost and not self._in_backward:
            given = notes_of((args, kwargs))
            gradients = torch.is_grad_enabled()
            self.table.entered.append(Entered(call.module, call.phase, module.training, gradients, given))
        index = len(self.table.calls) - 1
        self._stack.append(index)
        # Private: the public way to an autograd node's number is a profile, which is read when the step is over.
        start = torch.autograd._get_sequence_nr()
        try:
            yield
        finally:
            end = torch.autograd._get_sequence_nr()
            if end > start:
                self._levels[-1][1].append((start, end, index))
            self._stack.pop()

    def _note_call(self, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Call:
        if id(module) not in self._names:
            self._adopt(module)
        name = self._names[id(module)]
        phase = RECOMPUTE if self._in_backward else self.part
        if phase == "forward" and not torch.is_grad_enabled():
            phase = EVALUATION
        kind = type(module)
        linear = name in self._linears
        fp8 = linear and self._backend is not None and self._backend.is_fp8_layer(module)
        call = Call(
            module=name,
            kind=f"{kind.__module__}.{kind.__qualname__}",
            phase=phase,
            part=self.part,
            tensors=[(shape_of(tensor), dtype_name(tensor)) for tensor in tensors],
            given=self._source(tensors[0]) if tensors else NOTHING,
            training=module.training,
            outermost=not self._calling,
            inside=self._stack[-1] if self._stack else -1,
            needs_dgrad=any(tensor.requires_grad for tensor in tensors[:1]),
            needs_wgrad=linear and any(p.requires_grad for p in module.parameters() if p.dim() > 1),
            fp8=fp8,
            # torch.compile's wrapper calls the module unseen.
            of_library=_is_of_library(type(getattr(module, "_orig_mod", module))),
        )
        self.table.calls.append(call)
        if fp8 and self._backend is not None and self.part == "forward":
            self.table.recipes[name] = self._backend.recipe_in_force(module)
        return call

    def _note_fused(self, module: torch.nn.Module, rows: int, _: Any) -> None:
        """A product that a library's function computes without calling the layer. Such functions compute the input's
        gradient whether it is needed or not. Autograd runs their forward pass without gradients, also in training: the
        phase is that of the module that calls the function."""
        call = self._note_call(module, [])
        if call.inside >= 0:
            call.phase = self.table.calls[call.inside].phase
        columns = module._parameters["weight"].shape[-1]  # type: ignore[union-attr]
        call.tensors, call.needs_dgrad = [((rows, columns), "")], True

    def _adopt(self, module: torch.nn.Module) -> None:
        """Name a module that is no part of the model, and its children."""
        prefix = f"({type(module).__qualname__.rpartition('.')[2]} {len(self._adopted) + 1})"
        # Kept, so that no later module gets the same id.
        self._adopted.append(module)
        for name, child in module.named_modules():
            self._names.setdefault(id(child), f"{prefix}.{name}".rstrip("."))

    @contextmanager
    def _backward_pass(self) -> Iterator[None]:
        """Reentrant checkpointing goes backward inside a backward pass, through a graph made in another thread, whose
        sequence numbers begin anew."""
        self._levels.append((len(self._stack), []))
        try:
            yield
        finally:
            self._levels.pop()
            if self._in_backward:
                self._levels[-1][1].clear()

    @property
    def _in_backward(self) -> bool:
        return len(self._levels) > 1

    @property
    def _calling(self) -> bool:
        """Whether a module is called now, in the innermost backward pass where one runs."""
        return len(self._stack) > self._levels[-1][0]

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        self._recomputing += 1
        yield
        self._recomputing -= 1

    def _phase(self) -> str:
        """The phase that an operator runs in now."""
        again = self._recomputing or (self._in_backward and self._calling)
        return RECOMPUTE if again and self.part == "backward" else self.part

    def _owner(self) -> int:
        """Index of the call that the operator that runs now belongs to, or -1. The call that made the backward pass's
        node is marked as reached, and so are those that it lies in."""
        # Private: what runs backward is known to the profiler alone otherwise.
        node = torch._C._current_autograd_node() if self._in_backward else None
        if node is None or self._calling:
            return self._stack[-1] if self._stack else -1
        inside = index = _innermost(self._levels[-2][1], node._sequence_nr())
        while inside >= 0 and not self.table.calls[inside].reached:
            self.table.calls[inside].reached = True
            inside = self.table.calls[inside].inside
        return index

    # -- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        before = random_state() if draws else ""
        result = func(*args, **(kwargs or {}))
        if not self.part:
            return result
        operator = func._schema.name.removeprefix("aten::")
        given, made = _flat((args, kwargs)), _flat(result)
        event = Event(self._phase(), self._owner(), operator, ())
        first = next(iter([*made, *given]), None)
        if operator.startswith(SPACES) and kind_of(operator):
            first = max([*given, *made], key=lambda tensor: tensor.nbytes, default=None)
            event.bytes = first.nbytes if first is not None else 0
        if first is not None:
            event.shape, event.dtype = shape_of(first), dtype_name(first) if made or event.bytes else event.dtype
        event.products = products_of_call(event.phase, operator, args, result)
        if event.products:
            event.weight = self._weight(event, [args[index] for index in OPERANDS.get(operator, ())])
        event.chooses = _chooses_rows(func, given, made)
        on_host = bool(made) and made[0].device.type == "cpu" and any(tensor.is_cuda for tensor in given)
        event.waits = operator == READ or on_host
        if draws:
            event.state = before if random_state() != before else ""
        casts = operator in CASTS and event.dtype.startswith("float8") and event.phase == "backward"
        free = operator in NOT_COUNTED or operator.startswith(MARKS) or event.products or event.bytes
        if (casts or (event.phase == "forward" and not free)) and not _by_a_library():
            event.counted = True
            event.numbers = [value for value in args if isinstance(value, (int, float))]
            event.words = _words(func, args, kwargs)
        if event.told:
            self.table.events.append(event)
        return result

    def _source(self, tensor: torch.Tensor) -> int:
        """What made a tensor: the number of its node of autograd; without one a negative number of the tensor's own."""
        if tensor.grad_fn is not None:
            return tensor.grad_fn._sequence_nr()
        known = self._leaves.get(id(tensor))
        # A later tensor may have the address of one that is gone.
        if known is None or known[0]() is not tensor:
            known = self._leaves[id(tensor)] = weakref.ref(tensor), next(self._numbers)
        return known[1]

    def _weight(self, event: Event, operands: Sequence[torch.Tensor]) -> str:
        if not operands:
            return ""
        owner = self.table.owner(event)
        layers = {owner: self.layers[owner]} if owner in self.layers else self.layers
        weight = _weight_of(operands, layers, event.phase)
        # nn.MultiheadAttention multiplies with the weight of its out_proj, transformers' Mamba of its dt_proj.
        of_library = event.call >= 0 and self.table.calls[event.call].of_library
        return "" if of_library and weight.startswith(owner and f"{owner}.") else weight

    def _note_te(self, label: str) -> None:
        """A product of Transformer Engine's, which calls no operator of torch's."""
        if self.part and self._of_the_step():
            event = Event(self._phase(), self._owner(), "te", ())
            event.products = [te_product(event.phase, label, "")]
            self.table.events.append(event)


def _weight_of(operands: Sequence[torch.Tensor], layers: Mapping[str, torch.nn.Module], phase: str) -> str:
    """The layer whose weight is one of two operands, where training or an evaluation goes through this product.

    Empty for a product of weights alone (a penalty on W W^T), with a vector (power iteration), or in a forward pass
    without gradients (a measured quantization error). In a backward pass only products of a hand-written function
    count: the others follow from products of the forward pass. ``layers``: name -> module with a weight. Weights are
    looked up when a product runs: FSDP2 gathers them anew.
    """
    recorded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    # Private: what runs backward is known to the profiler alone otherwise.
    by_hand = isinstance(torch._C._current_autograd_node(), BackwardCFunction)
    left, right = operands
    if not (recorded or by_hand or phase == EVALUATION) or 1 in (left.shape[-2], right.shape[-1]):
        return ""
    found = {_layer_of(left, layers), _layer_of(right, layers)}
    return max(found) if "" in found else ""


def _layer_of(operand: torch.Tensor, layers: Mapping[str, torch.nn.Module]) -> str:
    """The layer whose weight it is, or a view, a cast or a copy of it that autograd recorded."""
    tensor, node = operand, operand.grad_fn
    while node is not None and node.name().partition("Backward")[0].lower() in _CARRIES:
        node = node.next_functions[0][0]
        tensor = getattr(node, "variable", tensor)
    if not _is_dense(tensor):
        return ""
    for name, layer in layers.items():
        weight = layer._parameters.get("weight")
        # FSDP and DeepSpeed keep the weights of several layers in one storage.
        if weight is not None and _is_dense(weight):
            start = weight.data_ptr()
            if start and start <= tensor.data_ptr() < start + weight.nbytes:
                return name
    return ""


_CARRIES = {name.replace("_", "") for name in (*VIEWS.split(), *COPIES.split())}
"""Nodes of autograd that give the values of their one input."""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's numbers lie in its own storage: not a DTensor's, a sparse or a nested tensor's."""
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(tensor, "__tensor_flatten__")


def _is_of_library(kind: type) -> bool:
    of_torch = any(one.__module__.startswith("torch.nn.") and one not in _WITHOUT_SETTINGS for one in kind.__mro__)
    return of_torch or is_of_a_library(next(one.__module__ for one in kind.__mro__ if "forward" in vars(one)))


_WITHOUT_SETTINGS = (torch.nn.Module, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
"""Classes of torch's from which users derive modules of every kind."""


def notes_of(given: Any) -> tuple[TensorNote, ...]:
    """The tensors in a value. Without a digest where autograd computed one: products round it otherwise in each arm."""
    with unwatched():
        return tuple(
            TensorNote(shape_of(each), dtype_name(each), digest_of(each) if each.grad_fn is None else "")
            for each in tensors_in(given)
        )


def _innermost(spans: list[Span], number: int) -> int:
    inside = [(end - start, call) for start, end, call in spans if start <= number < end]
    # Of equal spans the first: a call is noted when it ends, so that the innermost comes before what called it.
    return min(inside, key=lambda span: span[0])[1] if inside else -1


def _by_a_library() -> bool:
    """Whether an FP8 library's own code runs this operator, as when te.autocast is left and scales are renewed: the
    innermost code that is not torch's. Code that a library merely calls, as Accelerate calls a forward pass, is not."""
    frame = sys._getframe()
    while frame is not None and (TORCH in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        if SHARDING in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and any(library in frame.f_code.co_filename for library in LIBRARIES)


def _chooses_rows(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether the number of rows of the result follows from content, or may: a slice of rows whose ends the host read
    without a word to the dispatcher."""
    operator = func._schema.name.removeprefix("aten::")
    if operator == "index":
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    if operator in ("slice", "narrow", "split_with_sizes") and given and given[0].dim():
        return any(part.dim() == given[0].dim() and part.shape[0] != given[0].shape[0] for part in made)
    return torch.Tag.dynamic_output_shape in func.tags


def _words(func: Any, args: Any, kwargs: Any) -> list[str]:
    """The words among an operator's arguments, such as the approximation of a GELU; defaults, too."""
    arguments = func._schema.arguments
    given = {each.name: value for each, value in zip(arguments, args, strict=False)} | (kwargs or {})
    words = (given.get(each.name, each.default_value) for each in arguments)
    return [word for word in words if isinstance(word, str)]


def _flat(value: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results: they lie in lists at most."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
