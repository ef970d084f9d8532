"""What N ranks answered to one question as one answer: the whole batch's losses, the slowest rank's time, the worst
rank's memory. Pure: plain data in, plain data out.

What must be the same on every rank is compared, and a rank that answers otherwise is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pytest_fp8.arms.disagreement import (
    APART,
    BUILT,
    MODE,
    OFF,
    RAN,
    STORED,
    TRAINED,
    WEIGHTS,
    Answer,
    RanksDisagree,
    alike,
    difference,
    in_words,
    require_same,
)
from pytest_fp8.arms.together import combined, largest, mean_sketches, means, steps_of_all, summed
from pytest_fp8.questions.layers.products import FP8


def merged(operation: str, answers: Sequence[Any]) -> Any:
    """One answer of an arm whose ranks train one and the same model on parts of a batch, as under DDP, FSDP2 and
    ZeRO-3: weights and gradients as a whole are equal on all ranks. Raises :class:`RanksDisagree`."""
    merge = _MERGES.get(operation)
    return merge(answers) if merge is not None else answers[0]


# -- FP8 on every rank -------------------------------------------------------------------------------------------------


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
                raise RanksDisagree(rank, f"products of {part}", first, here, OFF)


# -- one operation each -----------------------------------------------------------------------------------------------


def _build(answers: Sequence[Answer]) -> Any:
    require_same(answers, ("libraries", "parameters", "compiled", "own_checkpoints", "foreign_parameters"), BUILT)
    told = {**answers[0], "seconds": largest([answer["seconds"] for answer in answers])}
    if "memory" in told:
        told["memory"] = largest([answer["memory"] for answer in answers])
    return told


def _layers(answers: Sequence[Answer]) -> Any:
    require_same(answers, ("in_eval",), MODE)
    keys = ("originals", "converted", "skipped", "live_fp8", "kinds", "switches")
    require_same(answers, keys, BUILT)
    for rank, answer in enumerate(answers):
        for name in answer["recipes"].keys() & answers[0]["recipes"].keys():
            pair = [{"recipes": {name: each["recipes"][name]}} for each in (answers[0], answer)]
            if pair[0] != pair[1]:
                where, one, two = difference(pair[0]["recipes"], pair[1]["recipes"], "recipe in force")
                raise RanksDisagree(rank, where, in_words(one), in_words(two), BUILT)
    if len({frozenset(call["name"] for call in answer["calls"]) for answer in answers}) == 1:
        # A rank whose batch has no image may call a layer in high precision in place of one in FP8.
        _require_fp8([_by_phase(answer["products"]) for answer in answers])
    # All times of the profiled step of one rank: whose own kernels take longest, for which the others wait.
    longest = max(answers, key=lambda answer: answer["milliseconds"].get("busy", 0.0) - answer["exposed_ms"])
    return {
        **longest,
        **steps_of_all(answers),
        "waits": largest([answer["waits"] for answer in answers]),
        "stale_amax": sorted({name for answer in answers for name in answer["stale_amax"]}),
        "dropped_behaviour": {name: what for answer in answers for name, what in answer["dropped_behaviour"].items()},
    }


def _by_phase(products: Sequence[Answer]) -> dict[str, tuple[int, int]]:
    counts = Counter((product["phase"], product["kind"] == FP8) for product in products)
    return {phase: (counts[phase, True], counts[phase, False]) for phase, _ in counts}


def _ledger(answers: Sequence[Answer]) -> Any:
    require_same([_parameters(answer) for answer in answers], ("before", "after"), WEIGHTS)
    keys = ("optimizer", "fp8_layers", "linears", "watched", "loss_dtype", "switches")
    require_same(answers, keys, BUILT)
    if not any(answer["routed"] for answer in answers):
        # A rank whose batch has no image calls no module for images.
        called = set.intersection(*({*answer["classes"]} for answer in answers))
        shared = [{**a, "classes": {name: a["classes"][name] for name in sorted(called)}} for a in answers]
        require_same(shared, ("classes",), BUILT)
        require_same(shared, ("stepped", "gradients"), RAN)
    return {
        **answers[0],
        "elsewhere": [answer["calls"] for answer in answers[1:]],
        # Ranks may differ in what they do; the arms may not.
        "products": [product for answer in answers for product in answer["products"]],
        "operators": summed([answer["operators"] for answer in answers]),
        "backward": sum(answer["backward"] for answer in answers),
        "batch": [note for answer in answers for note in answer["batch"]],
        "entered": [call for answer in answers for call in answer["entered"]],
        "waits": summed([answer["waits"] for answer in answers]),
        "loss": fmean(answer["loss"] for answer in answers),
        "random": " ".join(answer["random"] for answer in answers),
        "routed": sorted({name for answer in answers for name in answer["routed"]}),
        "recomputed_otherwise": sorted({name for answer in answers for name in answer["recomputed_otherwise"]}),
    }


def _parameters(ledger: Answer) -> Answer:
    """Without what ranks may have of their own: values of buffers, and hooks that log on one rank."""
    own = {True: ("hooks", "digest"), False: ("hooks",)}
    return {
        when: {
            name: {key: value for key, value in weight.items() if key not in own[weight["buffer"]]}
            for name, weight in ledger[when].items()
        }
        for when in ("before", "after")
    }


def _curve(answers: Sequence[Answer]) -> Any:
    courses = [answer["course"] for answer in answers]
    require_same(courses, ("rates", "stepped"), RAN)
    # Calls are those of FP8 layers alone. Compiled code has none to count, and a rank's products are all layers'.
    uncalled = not any(sum(answer["calls"]["fp8"]) for answer in answers)
    for when in ("first_products", "last_products") if uncalled else ():
        _require_fp8([{part: (n["fp8"], n["other"]) for part, n in answer[when].items()} for answer in answers])
    _require_fp8([{"forward": (sum(a["calls"]["fp8"]), sum(a["calls"]["other"]))} for a in answers])
    whole = answers[0]["weights"] and all(answers[0]["weights"].values())
    if not whole or not all(alike(answers[0]["weights"], answer["weights"]) for answer in answers):
        # An optimizer that reduces gradients inside its step is given each rank's own.
        require_same(answers, ("gradient_norms",), TRAINED)
    require_same(answers, ("weights",), APART)
    return {
        **{key: value for key, value in answers[0].items() if key != "weights"},
        "losses": means([answer["losses"] for answer in answers]),
        "data": combined([answer["data"] for answer in answers]),
        "calls": _calls([answer["calls"] for answer in answers]),
        "first_products": summed([answer["first_products"] for answer in answers]),
        "last_products": summed([answer["last_products"] for answer in answers]),
        # Of a sharded weight each rank looks at its own part.
        "course": {
            **courses[0],
            # An optimizer may keep the state of a weight on one rank alone.
            "state": {
                name: "; ".join(sorted({course["state"][name] for course in courses if name in course["state"]}))
                for name in dict.fromkeys(name for course in courses for name in course["state"])
            },
            "left": sorted({name for course in courses for name in course["left"]}),
            "alone": largest([course["alone"] for course in courses]),
        },
        "movement": {
            name: {key: fmean(answer["movement"][name][key] for answer in answers) for key in ("moved", "reached")}
            | {"elements": one["elements"]}
            for name, one in answers[0]["movement"].items()
        },
    }


def _calls(each: Sequence[Answer]) -> Any:
    """Of all ranks together, step by step."""
    layers = dict.fromkeys(layer for calls in each for layer in calls["looks"])
    return {
        **{key: list(map(sum, zip(*(calls[key] for calls in each), strict=True))) for key in ("fp8", "other")},
        "looks": {layer: [look for calls in each for look in calls["looks"].get(layer, ())] for layer in layers},
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
    apart = {}
    try:
        require_same(answers, ("sketches",), TRAINED)
    except RanksDisagree as error:
        # Sound where the step or the optimizer reduces them later. Sketches are linear: theirs is that of the mean.
        told = f"{error}: {error.other}; on rank 0 {error.first}"
        apart = {"apart": told, "sketches": mean_sketches([answer["sketches"] for answer in answers])}
    return {
        **answers[0],
        **apart,
        # A rank whose batch has no image has no gradient for it.
        "silent": sorted(set.intersection(*({*answer["silent"]} for answer in answers))),
        "loss": fmean(answer["loss"] for answer in answers),
        "data": combined([answer["data"] for answer in answers]),
        "random": " ".join(answer["random"] for answer in answers),
    }


def _saved(answers: Sequence[Answer]) -> Any:
    require_same(answers, ("keys", "digests", "optimizer_digests"), STORED)
    return answers[0]


def _loaded(answers: Sequence[Answer]) -> Any:
    keys = ("missing", "unexpected", "wrong_shape", "loaded", "digests", "optimizer_digests")
    require_same(answers, keys, STORED)
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
        "losses": means([answer["losses"] for answer in answers]),
        "data": combined([answer["data"] for answer in answers]),
        "inputs": [one for answer in answers for one in answer["inputs"]],
    }


def _blocks(answers: Sequence[Answer]) -> Any:
    times = zip(*(answer["milliseconds"] for answer in answers), strict=True)
    return {
        "milliseconds": list(map(max, times)),
        **{what: max(answer[what] for answer in answers) for what in ("compilations", "retries")},
        "ahead": min(answer["ahead"] for answer in answers),
        "host": largest([answer["host"] for answer in answers]),
    }


def _memory(answers: Sequence[Answer]) -> Any:
    return max(answers, key=lambda answer: answer["peak_allocated"])


_MERGES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "build": _build,
    "layers": _layers,
    "ledger": _ledger,
    "curve": _curve,
    "moved_losses": means,
    "moved_outputs": means,
    "moved_resumes": means,
    "numerics": _numerics,
    "moved_gradients": lambda answers: [_gradients(draws) for draws in zip(*answers, strict=True)],
    "blocks": _blocks,
    "busy": steps_of_all,
    "memory": _memory,
    "save": _saved,
    "load": _loaded,
    "carry_scales": _scales,
    "resume": _resumed,
}
"""Operation -> how its answers are merged. Of any other operation rank 0's counts."""
