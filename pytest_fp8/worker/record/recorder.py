"""Records one uncompiled step as a table: every call of a module and every operator, by owner, phase and micro-batch."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pytest_fp8.backends.base import Backend
from pytest_fp8.questions.layers.products import EVALUATION, Product
from pytest_fp8.questions.ledger.differences import OUTSIDE
from pytest_fp8.questions.ledger.evidence import Entered, TensorNote
from pytest_fp8.recipes import RECOMPUTE

Size = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor."""


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
    microbatch: int
    """How many backward passes of the step had begun."""
    tensors: Sequence[Size]
    """Its arguments that are tensors."""
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
    of_torch: bool
    """Whether its class is one of torch's own, or derived from one."""
    of_library: bool
    """Whether its class, or its ``forward``, is torch's or another package's."""
    reached: bool = False
    """Whether the backward pass goes through what it made."""
    given: torch.Tensor | None = None
    """Few values of its first tensor; of layers alone."""
    made: torch.Tensor | None = None
    """Few values of its first output."""


@dataclass(slots=True)
class Event:
    """One operator, or one product that a library computes without an operator."""

    phase: str
    """``forward``, ``backward``, ``recompute`` or ``evaluation``."""
    call: int
    """Index of the innermost call that it belongs to; -1: code outside all modules."""
    operator: str
    tensors: Sequence[Size]
    """What it gave, or where it gave nothing, what it was given."""
    dtype: str = "nothing"
    """Of what it gave."""
    products: Sequence[Product] = ()
    weight: str = ""
    """The layer whose weight it multiplies without a call of the layer."""
    numbers: Sequence[float] = ()
    words: Sequence[str] = ()
    """Numbers and words among its arguments."""
    counted: bool = False
    """Whether it is compared between the arms by its number: no view, no copy, no library's own."""
    waits: bool = False
    """Whether the host waits for it."""
    chooses: bool = False
    """Whether the number of rows that it gave follows from content."""
    state: str = ""
    """Digest of the generators' state before it, where it drew from them."""
    drawn: torch.Tensor | None = None
    """Few values of what it drew."""
    bytes: int = 0
    """Of the largest tensor of a collective."""


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
