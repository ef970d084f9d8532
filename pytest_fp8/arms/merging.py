"""What N ranks answered to one question as one answer: the whole batch's losses, the slowest rank's time, the worst
rank's memory. Pure: plain data in, plain data out.

Each operation has a rule, most of them :func:`record`: field -> its rule. What must be the same on every rank is
compared, and a rank that answers otherwise is named.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from pytest_fp8.plain import in_text, of_text
from pytest_fp8.questions.layers.products import FP8

Answer = Mapping[str, Any]
Rule = Callable[[Sequence[Any], str], Any]
"""Of one value of each rank, in their order, and the field's name: the value of all."""
Cause = tuple[str, str]
"""The likely cause, and what to do next."""
BUILT = (
    "it was built, converted or switched otherwise, or FP8 is off there: code that asks for the rank, model.eval() on "
    "one rank alone, other files, other variables",
    "build and convert the model, set its mode, and open the precision's context in the same way on every rank",
)
WEIGHTS = (
    "build() gave other weights there, or they were converted otherwise: weights that one rank alone loads, a seed or "
    "files of its own",
    "load the same weights on every rank, in build(): an arm sets the weights of its ranks itself, so that what DDP "
    "sends from rank 0 when it is made does not help",
)
TRAINED = (
    "its step does something else, changes weights in another way, or gradients are not reduced over all ranks, so "
    "that each trains a model of its own",
    "call the parallelized model itself, not the one inside it; leave no_sync() before the last backward pass of a "
    "step; no line of the step, of the optimizer or of the schedule may ask for the rank",
)
STORED = (
    "it saved or loaded other values than the others: a shard that is missing, or replicas that went apart",
    "save and load on every rank, through torch.distributed.checkpoint",
)
SKETCHES = "sketches"


class RanksDisagree(Exception):
    """One rank's answer is not that of rank 0."""

    def __init__(self, rank: int, what: str, first: str, other: str, cause: Cause) -> None:
        super().__init__(f"rank {rank}: {what}")
        self.rank, self.what, self.first, self.other = rank, what, first, other
        self.cause, self.next_step = cause


def merged(operation: str, answers: Sequence[Any]) -> Any:
    """One answer of an arm whose ranks train one and the same model on parts of a batch, as under DDP, FSDP2 and
    ZeRO-3: weights and gradients as a whole are equal on all ranks. Raises :class:`RanksDisagree`."""
    rule = RULES.get(operation)
    return answers[0] if rule is None or len(answers) == 1 else rule(answers, operation)


# -- rules -------------------------------------------------------------------------------------------------------------


def record(**rules: Rule) -> Rule:
    """Of records: each of these fields by its rule, in this order, where rank 0 has it; all others are rank 0's."""

    def rule(values: Sequence[Answer], _: str) -> dict[str, Any]:
        there = {key: field for key, field in rules.items() if key in values[0]}
        return {**values[0], **{key: field([value[key] for value in values], key) for key, field in there.items()}}

    return rule


def each(inner: Rule) -> Rule:
    """Of mappings: each key that any rank has, by a rule for the values of those that have it."""

    def rule(values: Sequence[Answer], _: str) -> dict[str, Any]:
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: inner([value[key] for value in values if key in value], key) for key in keys}

    return rule


def by(function: Callable[[Sequence[Any]], Any]) -> Rule:
    return lambda values, _: function(values)


def stepwise(function: Callable[[Sequence[Any]], Any]) -> Rule:
    """Of lists of one length, step by step."""
    return lambda values, _: [function(step) for step in zip(*values, strict=True)]


def same(cause: Cause, where_both: bool = False) -> Rule:
    """Raises :class:`RanksDisagree` for the first rank that differs from rank 0. ``where_both``: of mappings that may
    lack keys."""

    def rule(values: Sequence[Any], key: str) -> Any:
        for rank, value in enumerate(values):
            one, other = values[0], value
            if where_both:
                one, other = ({name: each[name] for name in value if name in one} for each in (one, value))
            if not alike(one, other):
                where, here, there = difference(one, other, key.replace("_", " "))
                raise RanksDisagree(rank, where, f"{here!s:.80}", f"{there!s:.80}", cause)
        return values[0]

    return rule


first = by(lambda values: values[0])
largest, total, mean = by(max), by(sum), by(fmean)
concatenated = by(lambda values: [one for value in values for one in value])
union = by(lambda values: sorted({one for value in values for one in value}))
common = by(lambda values: sorted(set.intersection(*({*value} for value in values))))
words = by(" ".join)
fingerprint = by(lambda values: zlib.crc32(repr(list(values)).encode()))
counts = each(each(total))


def mean_sketches(values: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The mean over the ranks. One that has no gradient of a parameter adds nothing to it."""
    found = {}
    for name in dict.fromkeys(name for sketches in values for name in sketches):
        told = zip(*(of_text(sketches[name]) for sketches in values if name in sketches), strict=True)
        found[name] = in_text(array("f", (sum(value) / len(values) for value in told)))
    return found


# -- what differs ------------------------------------------------------------------------------------------------------


def alike(one: Any, other: Any) -> bool:
    """Equal, where a number that is none is equal to itself."""
    return bool(one == other) or repr(one) == repr(other)


def difference(one: Any, other: Any, where: str) -> tuple[str, Any, Any]:
    """The first place where two values differ, and what is there in each; ``None``: nothing."""
    pairs: Iterator[tuple[str, Any, Any]] = iter(())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = ((f"{where}, {key}", one.get(key), other.get(key)) for key in [*one, *other])
    elif isinstance(one, list) and isinstance(other, list):
        pairs = ((f"{where}[{index}]", *pair) for index, pair in enumerate(zip_longest(one, other)))
    for place, here, there in pairs:
        if not alike(here, there):
            return difference(here, there, place)
    return where, one, other


def _require_fp8(counted: Sequence[Mapping[str, tuple[int, int]]]) -> None:
    """``counted``, of each rank: part of a step -> products in FP8, products in high precision. Raise where one rank
    has fewer of the first and more of the second than rank 0, or the reverse.

    Numbers alone may differ: a router gives the experts of one rank no rows.
    """
    for rank, mine in enumerate(counted):
        for part in dict.fromkeys([*counted[0], *mine]):
            pair = [products.get(part, (0, 0)) for products in (counted[0], mine)]
            (fp8, other), (fp8_here, other_here) = pair
            if (fp8_here - fp8) * (other_here - other) < 0:
                one, here = (f"{one} in FP8, {two} in high precision" for one, two in pair)
                raise RanksDisagree(rank, f"products of {part}", one, here, BUILT)


# -- operations of more than one field at a time -----------------------------------------------------------------------


def _layers(answers: Sequence[Answer], operation: str) -> Any:
    told = LAYERS(answers, operation)
    if len({frozenset(call["name"] for call in answer["calls"]) for answer in answers}) == 1:
        # A rank whose batch has no image may call a layer in high precision in place of one in FP8.
        _require_fp8([_by_phase(answer["products"]) for answer in answers])
    # All times of the profiled step of one rank: whose own kernels take longest, for which the others wait.
    longest = max(answers, key=lambda answer: answer["milliseconds"].get("busy", 0.0) - answer["exposed_ms"])
    of_all = {key: told[key] for key in ("waits", "stale_amax", "dropped_behaviour")}
    return {**longest, **steps_of_all(answers, operation), **of_all}


def _by_phase(products: Sequence[Answer]) -> dict[str, tuple[int, int]]:
    counted = Counter((product["phase"], product["kind"] == FP8) for product in products)
    return {phase: (counted[phase, True], counted[phase, False]) for phase, _ in counted}


def _ledger(answers: Sequence[Answer], operation: str) -> Any:
    told = LEDGER(answers, operation)
    if not told["routed"]:
        # A rank whose batch has no image calls no module for images.
        called = set.intersection(*({*answer["classes"]} for answer in answers))
        shared = [{**a, "classes": {name: a["classes"][name] for name in sorted(called)}} for a in answers]
        record(classes=same(BUILT), stepped=same(TRAINED), gradients=same(TRAINED))(shared, operation)
    return {**told, "elsewhere": [answer["calls"] for answer in answers[1:]]}


def _weights(values: Sequence[Answer], key: str) -> Any:
    """Without what ranks may have of their own: values of buffers, and hooks that log on one rank."""
    own = {True: ("hooks", "digest"), False: ("hooks",)}

    def shared(weight: Answer) -> Answer:
        return {key: value for key, value in weight.items() if key not in own[weight["buffer"]]}

    same(WEIGHTS)([{name: shared(weight) for name, weight in value.items()} for value in values], key)
    return values[0]


def _curve(answers: Sequence[Answer], operation: str) -> Any:
    told = CURVE(answers, operation)
    # Calls are those of FP8 layers alone. Compiled code has none to count, and a rank's products are all layers'.
    uncalled = not any(sum(answer["calls"]["fp8"]) for answer in answers)
    for when in ("first_products", "last_products") if uncalled else ():
        _require_fp8([{part: (n["fp8"], n["other"]) for part, n in answer[when].items()} for answer in answers])
    _require_fp8([{"forward": (sum(a["calls"]["fp8"]), sum(a["calls"]["other"]))} for a in answers])
    weights = told.pop("weights")
    whole = weights and all(weights.values())
    if not whole or not all(alike(weights, answer["weights"]) for answer in answers):
        # An optimizer that reduces gradients inside its step is given each rank's own.
        same(TRAINED)([answer["gradient_norms"] for answer in answers], "gradient_norms")
    same(TRAINED)([answer["weights"] for answer in answers], "weights")
    return told


def _gradients(answers: Sequence[Any], operation: str) -> Any:
    if answers[0] is None:
        return None
    told = GRADIENTS(answers, operation)
    sketches = [answer[SKETCHES] for answer in answers]
    try:
        same(TRAINED)(sketches, SKETCHES)
    except RanksDisagree as error:
        # Sound where the step or the optimizer reduces them later. Sketches are linear: theirs is that of the mean.
        told |= {"apart": f"{error}", SKETCHES: mean_sketches(sketches)}
    return told


def steps_of_all(answers: Sequence[Answer], _: str) -> dict[str, list[Any]]:
    """What each rank said of the same steps (``worker.record.clock.read_steps``) as one GPU's work, without what
    collectives wait for a late host.

    A collective runs on a rank from when this rank comes to it until the last one has done so. What it takes the rank
    that waits least is its own time; the rest waits for a rank that computes for longer, or whose host is late. It is
    left out as far as the other ranks' GPUs stood idle: behind a late host one does, and where ranks compute in turn
    none does. On two H100s with 224 small all-reduces a step and late hosts, 133 ms of a 377 ms step were collectives
    that nothing hid; 23 of 361 where none was late.
    """
    kinds = ("step_ms", "busy_ms", "compute_ms", "collectives")
    if len({len(answer["step_ms"]) for answer in answers}) > 1:
        # A profile that lost a mark: its steps are not the others'.
        slowest = max(answers, key=lambda answer: sum(answer["step_ms"]))
        return {**{kind: slowest[kind] for kind in kinds}, "collectives": []}
    told = {kind: list(zip(*(answer[kind] for answer in answers), strict=True)) for kind in kinds}
    computes = list(map(max, told["compute_ms"]))
    own = [compute + _least(step) for compute, step in zip(computes, told["collectives"], strict=True)]
    busy = map(max, own, map(_without_idle, told["step_ms"], told["busy_ms"]))
    return {
        "step_ms": list(map(max, told["step_ms"])),
        "busy_ms": list(busy),
        "compute_ms": computes,
        "collectives": [],
    }


def _least(ranks: Sequence[Sequence[tuple[str, float]]]) -> float:
    """Of one step: milliseconds of its collectives, of each on the rank where it takes least. All ranks run those of a
    kind in one order; those of two kinds may begin in either. One that the others count to a neighbouring step is a
    rank's own."""
    least = 0.0
    for kind in {kind for rank in ranks for kind, _ in rank}:
        found = ([ms for other, ms in rank if other == kind] for rank in ranks)
        least += sum(map(min, zip_longest(*found, fillvalue=math.inf)))
    return least


def _without_idle(steps: Sequence[float], busy: Sequence[float]) -> float:
    """Of one step: what a rank is busy at least, if its collectives waited whenever another rank's GPU was idle."""
    idle = [max(0.0, step - works) for step, works in zip(steps, busy, strict=True)]
    return max(works + mine - sum(idle) for works, mine in zip(busy, idle, strict=True))


# -- the table ---------------------------------------------------------------------------------------------------------

LAYERS = record(
    **dict.fromkeys(("in_eval", "originals", "converted", "skipped", "live_fp8", "kinds", "switches"), same(BUILT)),
    recipes=same(BUILT, where_both=True),
    waits=each(largest),
    stale_amax=union,
    dropped_behaviour=each(first),
)
LEDGER = record(
    before=_weights,
    after=_weights,
    **dict.fromkeys(("optimizer", "fp8_layers", "linears", "watched", "loss_dtype", "switches"), same(BUILT)),
    # Ranks may differ in what they do; the arms may not.
    **dict.fromkeys(("products", "batch", "entered"), concatenated),
    **dict.fromkeys(("operators", "waits"), counts),
    backward=total,
    loss=mean,
    random=words,
    **dict.fromkeys(("routed", "recomputed_otherwise"), union),
)
CURVE = record(
    course=record(
        **dict.fromkeys(("rates", "stepped"), same(TRAINED)),
        # An optimizer may keep the state of a weight on one rank alone.
        state=each(by(lambda values: "; ".join(sorted({*values})))),
        left=union,
        alone=each(largest),
    ),
    losses=stepwise(fmean),
    **dict.fromkeys(("data", "data_at_start"), fingerprint),
    calls=record(fp8=stepwise(sum), other=stepwise(sum), looks=each(concatenated)),
    first_products=counts,
    last_products=counts,
    # Of a sharded weight each rank looks at its own part.
    movement=each(record(moved=mean, reached=mean)),
)
GRADIENTS = record(
    # A rank whose batch has no image has no gradient for it.
    silent=common,
    loss=mean,
    data=fingerprint,
    random=words,
)
BUILD = record(
    **dict.fromkeys(("libraries", "parameters", "compiled", "own_checkpoints", "foreign_parameters"), same(BUILT)),
    memory=each(largest),
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(("build", "describe"), BUILD),
    "layers": _layers,
    "ledger": _ledger,
    "curve": _curve,
    "numerics": record(
        **dict.fromkeys(("products", "later", "evaluated", "evaluated_later"), concatenated),
        gradients=_gradients,
        moved=_gradients,
    ),
    "moved": stepwise(lambda draws: _gradients(draws, "") if isinstance(draws[0], dict) else fmean(draws)),
    "blocks": record(milliseconds=stepwise(max), compilations=largest, retries=largest),
    "busy": steps_of_all,
    "presence": by(lambda values: min(values, key=lambda value: value["fp8_share"] or 0.0)),
    "losses": stepwise(fmean),
    "memory": by(lambda values: max(values, key=lambda value: value["peak_allocated"])),
    "save": record(**dict.fromkeys(("digests", "optimizer_digests"), same(STORED))),
    "load": record(
        **dict.fromkeys(("refused", "digests", "optimizer_digests"), same(STORED)),
        stale=union,
    ),
    "resume": record(losses=stepwise(fmean), data=fingerprint, inputs=concatenated),
}
"""Operation -> how its answers are merged. Of any other operation rank 0's counts."""
