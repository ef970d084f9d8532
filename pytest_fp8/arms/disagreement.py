"""What every rank of an arm must answer alike, and the first thing in which one does not. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fp8.floats import of_text

Answer = Mapping[str, Any]


class RanksDisagree(Exception):
    """One rank's answer is not that of rank 0."""

    def __init__(self, rank: int, what: str, first: str, other: str, cause: Cause) -> None:
        super().__init__(f"rank {rank}: {what}")
        self.rank, self.what, self.first, self.other = rank, what, first, other
        self.cause, self.next_step = cause


Cause = tuple[str, str]
"""The likely cause, and what to do next."""
BUILT = (
    "it was built or converted otherwise: code that asks for the rank, other files, other variables",
    "build and convert the model in the same way on every rank, before it is parallelized",
)
RAN = (
    "its training step does something else: code that asks for the rank, or that follows from its own batch",
    "step the optimizer and the schedule in the same way on every rank",
)
WEIGHTS = (
    "build() gave other weights there, or they were converted otherwise: weights that one rank alone loads, a seed or "
    "files of its own",
    "load the same weights on every rank, in build(): an arm sets the weights of its ranks itself, so that what DDP "
    "sends from rank 0 when it is made does not help",
)
MODE = (
    "model.eval() or model.train() was called on one rank alone",
    "call them in the same way on every rank",
)
TRAINED = (
    "gradients are not reduced over all ranks, so that each rank trains a model of its own",
    "call the parallelized model itself, not the one inside it; leave no_sync() before the last backward pass of a "
    "step",
)
APART = (
    "replicas go apart in training: one rank's step changes weights in another way, or in another order",
    "change weights in the same way on every rank: no line after optimizer.step() may ask for the rank",
)
OFF = (
    "FP8 is off on one of them, or its layers were not converted there",
    "convert the model, and open the precision's context, in the same way on every rank",
)
STORED = (
    "it saved or loaded other values than the others: a shard that is missing, or replicas that went apart",
    "save and load on every rank, through torch.distributed.checkpoint",
)
SKETCHES = "sketches"
_WORDS = {
    "before": "weights before the conversion",
    "after": "weights after it",
    "classes": "modules that a step calls",
    "digests": "stored weights",
    "fp8_layers": "FP8 layers",
    "gradient_norms": "the gradients' norm, step by step",
    "gradients": "parameters with a gradient",
    "in_eval": "modules in eval mode",
    "kinds": "kinds of layers",
    "loss_dtype": "the loss's type",
    "optimizer": "the optimizer",
    "live_fp8": "FP8 layers",
    "optimizer_digests": "the optimizer's stored state",
    "originals": "Linears before the conversion",
    "converted": "converted layers",
    "rates": "learning rates",
    SKETCHES: "gradients of one step",
    "skipped": "layers that are not converted",
    "stepped": "optimizer steps",
    "switches": "torch's switches",
    "weights": "weights after training",
}
"""What an answer's keys mean, where they do not say it."""


def require_same(answers: Sequence[Answer], keys: Sequence[str], cause: Cause) -> None:
    """Raise :class:`RanksDisagree` for the first rank, and the first of these keys, that differs from rank 0's."""
    for rank, answer in enumerate(answers):
        for key in keys:
            if not alike(answers[0][key], answer[key]):
                where, first, other = difference(answers[0][key], answer[key], _WORDS.get(key, key))
                words = _norm_in_words if key == SKETCHES else in_words
                raise RanksDisagree(rank, where, words(first), words(other), cause)


def alike(one: Any, other: Any) -> bool:
    """Equal, where a number that is none is equal to itself."""
    return bool(one == other) or repr(one) == repr(other)


def difference(first: Any, other: Any, where: str) -> tuple[str, Any, Any]:
    """The first place where two values differ, and what is there in each. Of lists of different lengths: what the other
    lacks."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        for key in [*first, *other]:
            if not alike(first.get(key), other.get(key)):
                return difference(first.get(key), other.get(key), f"{where}, {key}")
    if isinstance(first, list) and isinstance(other, list):
        for index, (one, two) in enumerate(zip(first, other, strict=False)):
            if len(first) == len(other) and not alike(one, two):
                return difference(one, two, f"{where}[{index}]")
        more, less = (Counter(map(in_words, each)) for each in (first, other))
        return where, _entries(more - less, first), _entries(less - more, other)
    return where, first, other


def _entries(more: Counter[str], of: Sequence[Any]) -> str:
    return ", ".join(more.elements()) or f"{len(of)} entries"


def in_words(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) < 80 else f"{value[:40]}..."
    return "nothing" if value is None else f"{value!r:.200}"


def _norm_in_words(sketch: Any) -> str:
    """A sketch keeps lengths: the gradient's own, nearly."""
    if not isinstance(sketch, str):
        return in_words(sketch)
    return f"a gradient of norm {math.hypot(*of_text(sketch)):.5g}"
