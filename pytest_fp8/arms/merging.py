"""What N ranks answered to one question as one answer: the whole batch's losses, the slowest rank's time, the worst
rank's memory. Pure: plain data in, plain data out.

What must be the same on every rank is compared, and a rank that answers otherwise is named.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pytest_fp8.questions.layers.products import FP8

Answer = Mapping[str, Any]


class RanksDisagree(Exception):
    """One rank's answer is not that of rank 0."""

    def __init__(self, rank: int, what: str, first: Any, other: Any, cause: str, next_step: str) -> None:
        super().__init__(f"rank {rank}: {what}")
        self.rank, self.what, self.first, self.other = rank, what, _short(first), _short(other)
        self.cause, self.next_step = cause, next_step


BUILT = "it was built or converted otherwise: code that asks for the rank, other files, other variables"
BUILT_NEXT = "build and convert the model in the same way on every rank, before it is parallelized"
TRAINED = "gradients are not reduced over all ranks, so that each rank trains a model of its own"
TRAINED_NEXT = (
    "call the parallelized model itself, not the one inside it; leave no_sync() before the last backward pass of a step"
)
OFF = "FP8 is off on one of them, or its layers were not converted there"
OFF_NEXT = "convert the model, and open the precision's context, in the same way on every rank"
STORED = "it saved or loaded other values than the others: a shard that is missing, or replicas that went apart"
STORED_NEXT = "save and load on every rank, through torch.distributed.checkpoint"


def merged(operation: str, answers: Sequence[Any]) -> Any:
    """One answer of an arm whose ranks train one and the same model on parts of a batch, as under DDP, FSDP2 and
    ZeRO-3: weights and gradients as a whole are equal on all ranks. Raises :class:`RanksDisagree`."""
    merge = _MERGES.get(operation)
    return merge(answers) if merge is not None else answers[0]


# -- what all ranks must say alike ------------------------------------------------------------------------------------


def _same(answers: Sequence[Answer], keys: Sequence[str], cause: str, next_step: str) -> None:
    for rank, answer in enumerate(answers):
        for key in keys:
            if not _alike(answers[0][key], answer[key]):
                where, first, other = _difference(answers[0][key], answer[key], key)
                raise RanksDisagree(rank, where, first, other, cause, next_step)


def _alike(one: Any, other: Any) -> bool:
    """Equal, where a number that is none is equal to itself."""
    return bool(one == other) or repr(one) == repr(other)


def _difference(first: Any, other: Any, where: str) -> tuple[str, Any, Any]:
    """The first place where two values differ, and what is there in each."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        for key in [*first, *other]:
            if not _alike(first.get(key), other.get(key)):
                return _difference(first.get(key), other.get(key), f"{where}, {key}")
    if isinstance(first, list) and isinstance(other, list):
        for index, (one, two) in enumerate(zip(first, other, strict=False)):
            if not _alike(one, two):
                return _difference(one, two, f"{where}[{index}]")
        more, less = Counter(map(repr, first)), Counter(map(repr, other))
        return where, list(more - less) or f"{len(first)} entries", list(less - more) or f"{len(other)} entries"
    return where, first, other


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) < 80 else f"{value[:40]}..."
    return "nothing" if value is None else f"{value!r:.200}"


def _require_fp8(counts: Sequence[Mapping[str, tuple[int, int]]]) -> None:
    """``counts``, of each rank: part of a step -> products in FP8, products in high precision. Raise where one rank has
    fewer of the first and more of the second than rank 0, or the reverse.

    Numbers alone may differ: a router gives the experts of one rank no rows.
    """
    for rank, mine in enumerate(counts):
        for part in dict.fromkeys([*counts[0], *mine]):
            pair = [each.get(part, (0, 0)) for each in (counts[0], mine)]
            (fp8, other), (fp8_here, other_here) = pair
            if (fp8_here - fp8) * (other_here - other) < 0:
                first, here = (f"{one} in FP8, {two} in high precision" for one, two in pair)
                raise RanksDisagree(rank, f"products of {part}", first, here, OFF, OFF_NEXT)


# -- one operation each -----------------------------------------------------------------------------------------------


def _build(answers: Sequence[Answer]) -> Any:
    _same(answers, ("libraries", "torch", "cuda", "parameters", "compiled", "own_checkpoints"), BUILT, BUILT_NEXT)
    told = {**answers[0], "seconds": _largest([answer["seconds"] for answer in answers])}
    if "memory" in told:
        told["memory"] = {
            **_largest([answer["memory"] for answer in answers]),
            "free": min(answer["memory"]["free"] for answer in answers),
        }
    return told


def _layers(answers: Sequence[Answer]) -> Any:
    keys = ("originals", "converted", "skipped", "live_fp8", "kinds", "in_eval", "dropped_behaviour", "switches")
    _same(answers, keys, BUILT, BUILT_NEXT)
    for rank, answer in enumerate(answers):
        for name in answer["recipes"].keys() & answers[0]["recipes"].keys():
            pair = [{"recipes": {name: each["recipes"][name]}} for each in (answers[0], answer)]
            if pair[0] != pair[1]:
                where, first, here = _difference(pair[0]["recipes"], pair[1]["recipes"], "recipe in force")
                raise RanksDisagree(rank, where, first, here, BUILT, BUILT_NEXT)
    _require_fp8([_by_phase(answer["products"]) for answer in answers])
    # All times of one rank: the one whose own kernels take longest, for which the others wait.
    longest = max(answers, key=lambda answer: answer["milliseconds"].get("busy", 0.0) - answer["exposed_ms"])
    return {
        **longest,
        "waits": _largest([answer["waits"] for answer in answers]),
        "stale_amax": sorted({name for answer in answers for name in answer["stale_amax"]}),
    }


def _by_phase(products: Sequence[Answer]) -> dict[str, tuple[int, int]]:
    counts = Counter((product["phase"], product["kind"] == FP8) for product in products)
    return {phase: (counts[phase, True], counts[phase, False]) for phase, _ in counts}


def _ledger(answers: Sequence[Answer]) -> Any:
    keys = ("before", "after", "optimizer", "fp8_layers", "linears", "watched", "loss_dtype", "switches")
    _same(answers, keys, BUILT, BUILT_NEXT)
    if not any(_routes(answer) for answer in answers):
        _same(answers, ("classes", "backward", "stepped", "gradients"), BUILT, BUILT_NEXT)
    return {
        **answers[0],
        "batch": [note for answer in answers for note in answer["batch"]],
        "entered": [call for answer in answers for call in answer["entered"]],
        "waits": _largest([answer["waits"] for answer in answers]),
        "loss": fmean(answer["loss"] for answer in answers),
        "random": " ".join(answer["random"] for answer in answers),
        "uncertain": any(answer["uncertain"] for answer in answers),
        "recomputed_otherwise": sorted({name for answer in answers for name in answer["recomputed_otherwise"]}),
    }


def _routes(ledger: Answer) -> bool:
    return ledger["uncertain"] or any(part["routed"] for part in (*ledger["calls"], *ledger["products"]))


def _curve(answers: Sequence[Answer]) -> Any:
    courses = [answer["course"] for answer in answers]
    _same(courses, ("rates", "stepped", "state"), BUILT, BUILT_NEXT)
    for when in ("first_products", "last_products"):
        _require_fp8([{part: (n["fp8"], n["other"]) for part, n in answer[when].items()} for answer in answers])
    _require_fp8([{"forward": (sum(a["calls"]["fp8"]), sum(a["calls"]["other"]))} for a in answers])
    _same(answers, ("gradient_norms",), TRAINED, TRAINED_NEXT)
    return {
        **answers[0],
        "losses": _means([answer["losses"] for answer in answers]),
        "data": _combined([answer["data"] for answer in answers]),
        # Of a sharded weight each rank looks at its own part.
        "course": {
            **courses[0],
            "left": sorted({name for course in courses for name in course["left"]}),
            "alone": _largest([course["alone"] for course in courses]),
        },
        "movement": {
            name: {key: fmean(answer["movement"][name][key] for answer in answers) for key in ("moved", "reached")}
            | {"elements": one["elements"]}
            for name, one in answers[0]["movement"].items()
        },
    }


def _numerics(answers: Sequence[Answer]) -> Any:
    return {
        **answers[0],
        **{
            look: [product for answer in answers for product in answer[look]]
            for look in ("products", "later", "evaluated", "evaluated_later")
        },
        "gradients": _gradients([answer["gradients"] for answer in answers]),
        "moved": _gradients([a["moved"] for a in answers]) if answers[0]["moved"] is not None else None,
    }


def _gradients(answers: Sequence[Answer]) -> Any:
    _same(answers, ("silent", "sketches"), TRAINED, TRAINED_NEXT)
    return {
        **answers[0],
        "loss": fmean(answer["loss"] for answer in answers),
        "data": _combined([answer["data"] for answer in answers]),
        "random": " ".join(answer["random"] for answer in answers),
    }


def _saved(answers: Sequence[Answer]) -> Any:
    _same(answers, ("keys", "digests", "optimizer_digests"), STORED, STORED_NEXT)
    return answers[0]


def _loaded(answers: Sequence[Answer]) -> Any:
    keys = ("missing", "unexpected", "wrong_shape", "loaded", "digests", "optimizer_digests")
    _same(answers, keys, STORED, STORED_NEXT)
    return {**answers[0], "stale": sorted({name for answer in answers for name in answer["stale"]})}


def _scales(answers: Sequence[Answer]) -> Any:
    def of_all(key: str) -> dict[str, Any]:
        each = (answer[key].items() for answer in answers)
        return {f"rank {rank}: {name}": digest for rank, items in enumerate(each) for name, digest in items}

    tensors = {key: of_all(key) for key in ("stored", "reset", "loaded", "fresh")}
    words = {key: next((answer[key] for answer in answers if answer[key]), "") for key in ("refused", "failed")}
    return {**tensors, **words, "no_place": max(answer["no_place"] for answer in answers)}


def _resumed(answers: Sequence[Answer]) -> Any:
    return {
        **answers[0],
        "losses": _means([answer["losses"] for answer in answers]),
        "data": _combined([answer["data"] for answer in answers]),
        "inputs": [one for answer in answers for one in answer["inputs"]],
    }


def _blocks(answers: Sequence[Answer]) -> Any:
    times = zip(*(answer["milliseconds"] for answer in answers), strict=True)
    return {"milliseconds": list(map(max, times)), "compilations": max(answer["compilations"] for answer in answers)}


def _busy(answers: Sequence[Answer]) -> Any:
    slowest = max(answers, key=lambda answer: sum(answer["step_ms"]))
    return {key: slowest[key] for key in ("step_ms", "busy_ms", "compute_ms")}


def _memory(answers: Sequence[Answer]) -> Any:
    return max(answers, key=lambda answer: answer["peak_allocated"])


def _largest(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest number under each key of any."""
    return {key: max(one[key] for one in each if key in one) for key in {k: 0 for one in each for k in one}}


def _means(each: Sequence[Sequence[float]]) -> list[float]:
    """Of numbers step by step: the mean over the whole batch, of which every rank has an equal part."""
    return [sum(values) / len(values) for values in zip(*each, strict=True)]


def _combined(fingerprints: Sequence[int]) -> int:
    return zlib.crc32(repr(list(fingerprints)).encode())


_MERGES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "build": _build,
    "layers": _layers,
    "ledger": _ledger,
    "curve": _curve,
    "first_losses": _means,
    "moved_outputs": _means,
    "moved_resumes": _means,
    "numerics": _numerics,
    "moved_gradients": lambda answers: [_gradients(draws) for draws in zip(*answers, strict=True)],
    "blocks": _blocks,
    "busy": _busy,
    "memory": _memory,
    "save": _saved,
    "load": _loaded,
    "carry_scales": _scales,
    "resume": _resumed,
}
"""Operation -> how its answers are merged. Of any other operation rank 0's counts."""
