"""What is in a step's memory at its peak, by kind: replayed from what the allocator itself noted of one step."""

from __future__ import annotations

import math
import sys
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
FP8_TYPES = {
    kind
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (kind := getattr(torch, name, None)) is not None
}

Event = tuple[int, int]
"""An address, and the bytes that were allocated there; 0: they were freed."""


@dataclass(frozen=True)
class Label:
    """Says of the blocks that are live at these addresses, once so many events have passed, of which kind they are. The
    first label of a block counts."""

    after: int
    kind: str
    addresses: Collection[int]


@dataclass
class _Block:
    """Memory at an address between two numbers of events."""

    address: int
    bytes: int
    born: int = 0
    died: float = math.inf


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
    blocks = [_Block(address, count) for address, count in held.items()]
    live = {block.address: block for block in blocks}
    now = most = sum(held.values())
    peak = 0
    for place, (address, count) in enumerate(events):
        if gone := live.pop(address, None):
            gone.died, now = place + 1, now - gone.bytes
        if count:
            live[address] = _Block(address, count, place + 1)
            blocks.append(live[address])
        now += count
        if now > most and place not in skipped:
            peak, most = place + 1, now
    ordered = sorted(labels, key=lambda label: label.after)
    found: dict[str, int] = {}
    for block in blocks:
        if block.born <= peak < block.died:
            named = (each for each in ordered if block.born <= each.after < block.died)
            kind = next((label.kind for label in named if block.address in label.addresses), OTHER)
            found[kind] = found.get(kind, 0) + block.bytes
    return found


def left_by(events: Sequence[Event]) -> set[int]:
    """Addresses of what was allocated in these events and is live after them."""
    live: set[int] = set()
    for address, count in events:
        (live.add if count else live.discard)(address)
    return live


class AllocatorHistory:
    """What torch's allocator notes of this process while it is on, of the current GPU."""

    def __enter__(self) -> AllocatorHistory:
        # Private names, which PyTorch's notes "Understanding CUDA Memory Usage" document all the same.
        torch.cuda.memory._record_memory_history("all", context=None)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.memory._record_memory_history(None)

    def held(self) -> dict[int, int]:
        """Address -> bytes of each live block."""
        device = torch.cuda.current_device()
        return {
            block["address"]: block["size"]
            for segment in torch.cuda.memory._snapshot()["segments"]
            if segment.get("device", device) == device
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }

    def events(self) -> list[Event]:
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        # A block counts as free once its tensor is gone, not once another stream is done with it.
        sizes = {"alloc": 1, "free_requested": 0}
        return [
            (entry["addr"], -(-entry["size"] // SMALLEST) * SMALLEST * sizes[entry["action"]])
            for entry in trace
            if entry["action"] in sizes
        ]


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
    with AllocatorHistory() as history:
        held = history.held()
        seen = StepLabels(engine, history.events)
        seen.resident()
        try:
            with torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda tensor: tensor):
                engine.step(batch, seen.phase, seen.gradients)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return {}
        events = history.events()
    return summed_to(at_peak(held, events, seen.labels, seen.uncounted), peak)


def summed_to(kinds: Mapping[str, int], peak: int) -> dict[str, int]:
    """The kinds with what is missing to the peak as ``other``; empty where too much is."""
    if abs(sum(kinds.values()) - peak) > AGREES * peak:
        return {}
    named = {kind: count for kind, count in kinds.items() if kind != OTHER}
    return {**named, OTHER: peak - sum(named.values())}


def is_fp8(tensor: torch.Tensor) -> bool:
    """Whether it holds FP8 values. Transformer Engine's are in bytes."""
    if tensor.dtype in FP8_TYPES:
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
