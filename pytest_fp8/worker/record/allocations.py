"""What is in a step's memory at its peak, by kind: replayed from what the allocator itself noted of one step."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.questions.memory import ACTIVATIONS, COPIES, GRADIENTS, OPTIMIZER, OTHER, WEIGHTS
from pytest_fp8.worker import tensors

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

AGREES = 0.05
"""The allocator counts whole blocks, which may be up to a MiB larger than what was requested and noted. Where the two
peaks differ by a larger share, another step was replayed than the measured one, and nothing is told."""
SMALLEST = 512
"""Bytes: a block is a multiple of it."""
Event = tuple[int, int]
"""An address, and the bytes that were allocated there; 0: they were freed."""


@dataclass(frozen=True)
class Label:
    """Says of the blocks that are live at these addresses, once so many events have passed, of which kind they are. The
    first label of a block counts."""

    after: int
    kind: str
    addresses: Collection[int]


def at_peak(
    held: Mapping[int, int],
    events: Sequence[Event],
    labels: Iterable[Label],
    uncounted: Collection[tuple[int, int]] = (),
) -> dict[str, int]:
    """Bytes by kind at the moment when most is allocated; what no label names is ``other``. Pure.

    ``held``: address -> bytes of what is live before the first event. ``uncounted``: ranges of events in which no peak
    is looked for.
    """
    skipped = {place for start, end in uncounted for place in range(start, end)}
    live: dict[int, list[Any]] = {address: [count, OTHER] for address, count in held.items()}
    now = most = sum(held.values())
    there = list(live.values())
    due = deque(sorted(labels, key=lambda label: label.after))
    for place, (address, count) in enumerate([*events, (0, 0)]):
        while due and due[0].after == place:
            label = due.popleft()
            # A block of the peak may be named later: a gradient, when all are there.
            for block in (live[each] for each in label.addresses if each in live):
                block[1] = label.kind if block[1] == OTHER else block[1]
        now += count - live.pop(address, [0])[0]
        if count:
            live[address] = [count, OTHER]
        if now > most and place not in skipped:
            most, there = now, list(live.values())
    found = Counter[str]()
    for count, kind in there:
        found[kind] += count
    return dict(found)


def left_by(events: Sequence[Event]) -> set[int]:
    """Addresses of what was allocated in these events and is live after them."""
    live: set[int] = set()
    for address, count in events:
        (live.add if count else live.discard)(address)
    return live


@contextmanager
def allocator_history() -> Iterator[tuple[dict[int, int], Callable[[], list[Event]]]]:
    """Have torch's allocator note what it does in this process. Gives address -> bytes of each block that is live now,
    and what tells the events since, of the current GPU."""
    device = torch.cuda.current_device()
    # Private names, which PyTorch's notes "Understanding CUDA Memory Usage" document all the same.
    memory: Any = torch.cuda.memory
    # A block counts as free once its tensor is gone, not once another stream is done with it.
    sizes = {"alloc": 1, "free_requested": 0}

    def events() -> list[Event]:
        trace = memory._snapshot()["device_traces"][device]
        told = [(each["addr"], each["size"], sizes[each["action"]]) for each in trace if each["action"] in sizes]
        return [(address, -(-size // SMALLEST) * SMALLEST * stays) for address, size, stays in told]

    memory._record_memory_history("all", context=None)
    try:
        segments = [each for each in memory._snapshot()["segments"] if each.get("device", device) == device]
        blocks = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
        yield {block["address"]: block["size"] for block in blocks}, events
    finally:
        memory._record_memory_history(None)


@dataclass
class StepLabels:
    """Gathers the labels of one step."""

    engine: Engine
    events: Callable[[], list[Event]]
    labels: list[Label] = field(default_factory=list)
    uncounted: list[tuple[int, int]] = field(default_factory=list)
    saved_fp8: set[int] = field(default_factory=set)
    """Addresses of the FP8 tensors that autograd keeps."""

    def resident(self) -> None:
        """Label what is there between steps."""
        model, optimizer = self.engine.model, self.engine.optimizer
        weights = [*model.parameters(), *model.buffers()]
        states = [*tensors.foreign(model, optimizer), *tree_leaves(list(optimizer.state.values()))]
        held = [each for module in model.modules() for each in tree_leaves(_kept(module))]
        self._add(0, COPIES, (part for part in _parts([*weights, *held]) if is_fp8(part)))
        self._add(0, WEIGHTS, _parts(weights))
        self._add(0, OPTIMIZER, _parts(states))

    def gradients(self) -> None:
        """Label the gradients, which are complete."""
        parameters = [*self.engine.model.parameters(), *tensors.foreign(self.engine.model, self.engine.optimizer)]
        self._add(len(self.events()), GRADIENTS, _parts(tensors.held(each).gradient() for each in parameters))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step. What the forward pass leaves is what it keeps for the backward pass."""
        began = len(self.events())
        yield
        events = self.events()
        if name == EVALUATION:
            self.uncounted.append((began, len(events)))
        elif name == "forward":
            self.labels.append(Label(len(events), COPIES, frozenset(self.saved_fp8)))
            self.labels.append(Label(len(events), ACTIVATIONS, left_by(events[began:])))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """For ``saved_tensors_hooks``: note which of the tensors that autograd keeps are FP8."""
        for part in _parts([tensor]):
            (self.saved_fp8.add if is_fp8(part) else self.saved_fp8.discard)(_address(part))
        return tensor

    def _add(self, after: int, kind: str, parts: Iterable[torch.Tensor]) -> None:
        self.labels.append(Label(after, kind, {_address(part) for part in parts}))


def kinds_at_peak(engine: Engine, batch: Any, peak: int) -> dict[str, int]:
    """Bytes of each kind at the peak of one more training step; they add up to ``peak``, what the allocator counted in
    a step like it. Empty where the step has another peak, or cannot be watched: ``torch.func`` refuses hooks on saved
    tensors, and another allocator notes nothing."""
    engine.synchronize()
    with allocator_history() as (held, told):
        seen = StepLabels(engine, told)
        seen.resident()
        try:
            with torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda tensor: tensor):
                engine.step(batch, seen.phase, seen.gradients)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return {}
        events = told()
    return summed_to(at_peak(held, events, seen.labels, seen.uncounted), peak)


def summed_to(kinds: Mapping[str, int], peak: int) -> dict[str, int]:
    """The kinds with what is missing to the peak as ``other``; empty where too much is."""
    if abs(sum(kinds.values()) - peak) > AGREES * peak:
        return {}
    named = {kind: count for kind, count in kinds.items() if kind != OTHER}
    return {**named, OTHER: peak - sum(named.values())}


def is_fp8(tensor: torch.Tensor) -> bool:
    """Whether it holds FP8 values. Transformer Engine's are in bytes."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return True
    return tensor.dtype is torch.uint8 and tensor.dim() > 1 and "transformer_engine" in sys.modules


def _kept(module: torch.nn.Module) -> list[Any]:
    """What a module keeps beside parameters, buffers and modules: copies of its weight in FP8."""
    own = ("_parameters", "_buffers", "_modules")
    return [value for name, value in vars(module).items() if name not in own and isinstance(value, torch.Tensor | dict)]


def _parts(found: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The plain tensors that each tensor is made of: a subclass holds others, and has no memory of its own."""
    for each in found:
        if not isinstance(each, torch.Tensor):
            continue
        tensor = tensors.held(each).local()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            yield tensor
        else:
            inside = [value for value in vars(tensor).values() if isinstance(value, torch.Tensor)]
            yield from _parts(inside) if inside else [tensor]


def _address(tensor: torch.Tensor) -> int:
    """Of the tensor's storage; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
