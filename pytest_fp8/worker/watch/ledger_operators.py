"""Notes every operator of one step with the module that called it: products, all else by number, waits of the host."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_fp8.questions.ledger.evidence import Collective, Draw, OwnedProduct
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.worker.training.restored import replaced
from pytest_fp8.worker.watch.ledger_modules import ModuleWatch, shape_of
from pytest_fp8.worker.watch.ledger_weights import random_state
from pytest_fp8.worker.watch.operators import OPERANDS, dtype_name, products_of_call
from pytest_fp8.worker.watch.recomputation import watch_recomputation
from pytest_fp8.worker.watch.weights_used import WeightsUsed
from pytest_fp8.worker.watch.wire import collective_of

READ = "_local_scalar_dense"
"""What ``.item()``, ``float(tensor)`` and ``if tensor:`` call: the host waits for the value."""
CHOOSE_ROWS = (
    "nonzero",
    "masked_select",
    "unique",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)
"""Operators whose result has as many rows as their input's content says."""
VIEWS = """
    view _unsafe_view reshape expand t transpose permute unsqueeze squeeze select slice split split_with_sizes unbind
    as_strided alias detach detach_ lift_fresh chunk narrow unfold diagonal view_as_real view_as_complex _reshape_alias
    movedim flatten"""
"""What carries no arithmetic depends on how a layer lays out its output."""
COPIES = """
    clone contiguous _to_copy copy_ _copy_from empty empty_like empty_strided new_empty new_empty_strided zeros
    zeros_like ones ones_like full full_like new_zeros new_ones new_full scalar_tensor zero_ fill_ set_ resize_
    is_same_size record_stream pin_memory"""
MARKS = """
    profiler::_record_function_enter profiler::_record_function_enter_new profiler::_record_function_exit"""
"""torch sets them around an optimizer's step."""
NOT_COUNTED = {*VIEWS.split(), *COPIES.split(), *MARKS.split(), READ}
NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm", "rms_norm")
ROOTS = ("rsqrt", "sqrt")
"""What a norm that is written by hand takes of the mean square, after it has added its epsilon."""
SHARDING = f"{os.sep}torch{os.sep}distributed{os.sep}fsdp{os.sep}"
"""FSDP2's own copies, which differ where weights are gathered in FP8."""
LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("transformer_engine", "torchao", "accelerate"))
"""Folders of the libraries that switch FP8 on."""
TORCH = f"{os.sep}torch{os.sep}"


class OperatorWatch(TorchDispatchMode):
    """What reaches the dispatcher in the forward, backward and evaluation phases.

    It is off in the optimizer's phase, whose compiled code runs as it is.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = ModuleWatch(model, lambda: self.phase)
        self.on_draw: Callable[[str, torch.Tensor, bool], None] = lambda operator, tensor, again: None
        """Called with what an operator drew at random, and whether that recomputes."""
        self.products: list[OwnedProduct] = []
        self._weights = WeightsUsed(self.modules.layers)
        self.operators: dict[str, Counter[str]] = {}
        self._added = ""
        """The number that the last operator added; empty where that was no addition."""
        self.draws: list[Draw] = []
        self.waits: dict[str, Counter[str]] = {}
        self.wire: Counter[Collective] = Counter()
        self.may_route = False
        """Whether the host read a value, or an operator gave fewer rows than it was given: sizes may follow from it."""
        self.phase = ""
        self._recomputing = 0

    @contextmanager
    def in_phase(self, name: str, dispatch: bool = True) -> Iterator[None]:
        """Watch what runs inside as part of the phase ``name``; its operators where ``dispatch``."""
        if name == "optimizer":
            yield
            return
        outer, self.phase = self.phase, name
        try:
            with torch.compiler.set_stance("force_eager"), self if dispatch else nullcontext():
                yield
        finally:
            self.phase = outer

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the modules' calls, what checkpointing recomputes, and functions that wait for the GPU."""
        with ExitStack() as stack:
            stack.enter_context(self.modules.watching())
            stack.enter_context(watch_recomputation(self._recomputation))
            stack.enter_context(self._following_waits())
            yield

    def work(self) -> Mapping[str, Counter[str]]:
        """All that each module did, by its kind and size."""
        work: defaultdict[str, Counter[str]] = defaultdict(Counter, {o: Counter(c) for o, c in self.operators.items()})
        for call, count in self.modules.calls.items():
            work[call.module][f"{call.phase} of {call.shape}"] += count
        for entered in self.modules.entered:
            work[entered.module][f"{entered.phase} of {[note.shape for note in entered.tensors]}"] += 1
        for owned in self.products:
            work[owned.owner][str(owned.product)] += 1
        for draw in self.draws:
            work[draw.owner][f"{draw.phase} {draw.operator} {draw.shape}"] += 1
        for owner, waits in self.waits.items():
            work[owner]["wait"] += waits.total()
        return work

    def where(self) -> str:
        """The phase that an operator runs in now."""
        recomputes = self._recomputing or self.modules.recomputing
        return RECOMPUTE if recomputes and self.phase == "backward" else self.phase

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        self._recomputing += 1
        yield
        self._recomputing -= 1

    @contextmanager
    def _following_waits(self) -> Iterator[None]:
        with ExitStack() as stack:
            for home, name in ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (time, "sleep")):
                stack.enter_context(replaced(home, name, self._counted(getattr(home, name))))
            yield

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.phase and self.modules.of_the_step():
                self._wait()
            return real(*args, **kwargs)

        return call

    def _wait(self) -> None:
        self.waits.setdefault(self.modules.owner(), Counter())[self.where()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = self.phase and torch.Tag.nondeterministic_seeded in func.tags
        before = random_state() if draws else ""
        result = func(*args, **(kwargs or {}))
        if draws and random_state() != before:
            what = func._schema.name.removeprefix("aten::")
            shape = shape_of(next(iter(_flat(result) or _flat(args)), torch.empty(0)))
            self.draws.append(Draw(self.where(), self.modules.owner(), what, shape, before))
        if self.phase:
            operator = func._schema.name.removeprefix("aten::")
            given = _flat((args, kwargs))
            self._weights.note(operator, func._schema.is_mutable, given, _flat(result))
            self._note(operator, args, given, result, partial(_texts, func, args, kwargs))
            made = _flat(result) if torch.Tag.nondeterministic_seeded in func.tags else []
            if made:
                # A dropout gives its mask beside its result.
                self.on_draw(operator, made[operator == "native_dropout"], self.where() == RECOMPUTE)
        return result

    def _note(
        self, operator: str, args: Any, given: list[torch.Tensor], result: Any, texts: Callable[[], list[str]]
    ) -> None:
        made = _flat(result)
        collective = collective_of(self.where(), operator, given + made)
        if collective is not None:
            self.wire[collective] += 1
        if operator == READ or (made and made[0].device.type == "cpu" and any(tensor.is_cuda for tensor in given)):
            self._wait()
            self.may_route = True
        products = products_of_call(self.where(), operator, args, result)
        if products:
            owner, operands = self.modules.owner(), [args[index] for index in OPERANDS.get(operator, ())]
            weight = self._weights.used(operands, self.where()) if operands and owner not in self.modules.layers else ""
            # nn.MultiheadAttention multiplies with the weight of its out_proj, transformers' Mamba of its dt_proj.
            if owner in self.modules.of_a_library and weight.startswith(owner and f"{owner}."):
                weight = ""
            self.products += [OwnedProduct(owner, product, weight) for product in products]
        if "attention" in operator:
            operator = "attention"
        self.may_route |= _chooses_rows(operator, given, made)
        counted = operator not in NOT_COUNTED and not products and self.where() == "forward"
        if counted and collective is None and not _by_a_library():
            self._count(operator, args, made, texts())

    def _count(self, operator: str, args: Any, made: list[torch.Tensor], texts: list[str]) -> None:
        owner = self.modules.owner()
        dtype = dtype_name(made[0]) if made else "nothing"
        numbers = ",".join(f"{value:.4g}" for value in args if isinstance(value, float))
        if operator in ROOTS:
            numbers = self._added
        elif "loss" in operator:
            # How it is reduced, and which labels it leaves out.
            numbers = ",".join(f"{value:.4g}" for value in args if isinstance(value, (int, float)))
        elif owner not in self.modules.of_torch and operator not in NORMS:
            # The rate of a dropout is a setting; a number in a module of the user's may count steps.
            self._added, numbers = numbers if operator.startswith("add") else "", ""
        settings = ",".join(filter(None, [numbers, *texts]))
        self.operators.setdefault(owner, Counter())[f"{operator} {dtype} {settings}".rstrip()] += 1


def _by_a_library() -> bool:
    """Whether an FP8 library's own code runs this operator, as when te.autocast is left and scales are renewed: the
    innermost code that is not torch's. Code that a library merely calls, as Accelerate calls a forward pass, is not."""
    frame = sys._getframe()
    while frame is not None and (TORCH in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        if SHARDING in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and any(library in frame.f_code.co_filename for library in LIBRARIES)


def _chooses_rows(operator: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether the number of rows of the result follows from content, or may: a slice of rows whose ends the host read
    without a word to the dispatcher."""
    if operator in CHOOSE_ROWS:
        return True
    if operator == "index":
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    if operator in ("slice", "narrow", "split_with_sizes") and given and given[0].dim():
        return any(part.dim() == given[0].dim() and part.shape[0] != given[0].shape[0] for part in made)
    return False


def _texts(func: Any, args: Any, kwargs: Any) -> list[str]:
    """The words among an operator's arguments, such as the approximation of a GELU; defaults, too."""
    arguments = func._schema.arguments
    given = {each.name: value for each, value in zip(arguments, args, strict=False)} | (kwargs or {})
    words = (given.get(each.name, each.default_value) for each in arguments)
    return [word for word in words if isinstance(word, str)]


def _flat(value: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results: they lie in lists at most."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
