"""What arms answer: records cross the pipe as plain data, and the answers of several ranks become one."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from helpers.evidence import arm_ledger, curves, layers_evidence, transfer
from helpers.fakes import timed
from pytest_fp8.arms.merging import RanksDisagree, merged
from pytest_fp8.plain import PlainDataError, from_plain, to_plain


def positive(value, where):
    if value <= 0:
        raise PlainDataError(f"{where} is {value}")


@dataclass(frozen=True)
class Part:
    name: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Whole:
    parts: Mapping[str, Part]
    losses: Sequence[float]
    targets: tuple[str, ...]
    options: Mapping[str, Any]
    main: Part | None = None
    tables: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    on: bool = False
    count: Annotated[int, positive] = 1


PART = Part("q", (64, 32))
WHOLE = Whole({"a": PART}, [1.0, float("inf")], ("x", "y"), {"deep": [1, {"two": None}]}, PART, {"t": [PART, PART]})


def travelled(record, **changed):
    return {**json.loads(json.dumps(to_plain(record))), **changed}


def test_a_record_comes_back_as_it_went():
    assert from_plain(Whole, travelled(WHOLE)) == WHOLE


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sise": 1}, r"Whole has no field 'sise'"),
        ({"parts": []}, r"Whole\.parts is list, not a mapping"),
        ({"losses": "1.0"}, r"Whole\.losses is str, not a list"),
        ({"main": "q"}, r"Whole\.main is str, not a record"),
        ({"main": {"name": "q", "size": [1]}}, r"Whole\.main\.size has 1 values, not 2"),
        ({"tables": {"t": [{"name": "q"}]}}, r"Whole\.tables\['t'\]\[0\] lacks 'size'"),
        ({"targets": [1]}, r"Whole\.targets\[0\] is int, not str"),
        ({"losses": [True]}, r"Whole\.losses\[0\] is bool, not float"),
        ({"on": 1}, r"Whole\.on is int, not bool"),
        ({"count": True}, r"Whole\.count is bool, not int"),
        ({"count": 0}, r"Whole\.count is 0"),
    ],
)
def test_a_value_of_another_kind_is_an_error_that_names_the_way_to_it(changes, says):
    with pytest.raises(PlainDataError, match=says):
        from_plain(Whole, travelled(WHOLE, **changes))


@pytest.mark.parametrize("record", [layers_evidence(), arm_ledger(), curves()[0], transfer().saved, transfer().loaded])
def test_what_an_arm_does_not_say_is_never_taken_as_healthy(record):
    answer = to_plain(record)
    assert to_plain(from_plain(type(record), answer)) == answer
    for key in answer:
        with pytest.raises(PlainDataError, match=f"{type(record).__name__} lacks '{key}'"):
            from_plain(type(record), {name: value for name, value in answer.items() if name != key})


# -- several ranks: the whole batch's losses, and the worst of each number; what must be alike is named ----------------


def curve(losses=(3.0, 2.0), norms=(1.0, 0.5), data=1, fp8=6, other=1, weights=None, calls=None, **course):
    counts = {"forward": {"fp8": fp8, "other": other}}
    return {
        "losses": list(losses),
        "gradient_norms": list(norms),
        "data": data,
        "weights": weights or {},
        "course": {"rates": [{"lr": [1e-3]}], "stepped": [1], "state": {}, "left": [], "alone": {}, **course},
        "movement": {"w": {"elements": 8, "moved": 0.5, "reached": 1.0}},
        "first_products": counts,
        "last_products": counts,
        "calls": {"fp8": [fp8], "other": [other], "looks": {}, **(calls or {})},
    }


AS_BUILT = ("originals", "converted", "skipped", "live_fp8", "kinds", "in_eval")


def layers(kinds=("fp8", "fp8", "bfloat16"), busy=10.0, called=("a",), **changes):
    return {
        **{key: ["a"] for key in AS_BUILT},
        "calls": [{"name": name} for name in called],
        "dropped_behaviour": {},
        "switches": {},
        "recipes": {"a": {"recipe": "tensorwise"}},
        "products": [{"phase": "forward", "kind": kind} for kind in kinds],
        "milliseconds": {"busy": busy},
        "step_ms": [busy + 1],
        "busy_ms": [busy],
        "compute_ms": [busy - 2],
        "collectives": [[("all-gather", 2.0)]],
        "wire": [{"operation": "all-gather", "milliseconds": busy / 2}],
        "rest": [{"name": "copy", "count": 1, "milliseconds": busy}],
        "exposed_ms": busy / 10,
        "waits": {"cudaStreamSynchronize": round(busy)},
        "stale_amax": [],
        **changes,
    }


BUILT = dict.fromkeys(("libraries", "parameters", "compiled", "own_checkpoints", "foreign_parameters"), "a")
WORK = ("stepped", "gradients")
OF_EACH = ("batch", "entered", "calls", "products", "recomputed_otherwise", "routed", "waits", "loss", "random")
OWN = ("operators", "backward")
WEIGHT = {"buffer": False, "digest": "a", "hooks": 0}
LEDGER = {
    **dict.fromkeys(("optimizer", "fp8_layers", "linears", "watched", "loss_dtype", "switches", *WORK), "a"),
    **{when: {"w": WEIGHT, "mean": {**WEIGHT, "buffer": True}} for when in ("before", "after")},
    "operators": {"": {"aten::add": 1}},
    "backward": 1,
    "classes": {"layer": "Linear"},
    **{key: [] for key in OF_EACH[:6]},
    "waits": {},
    "loss": 1.0,
    "random": "r",
}
OTHER = {**LEDGER["before"], "w": {**WEIGHT, "digest": "b"}}
SAVED = {"digests": {"w": 1}, "optimizer_digests": {"w": 2}}
LOADED = {**SAVED, "refused": "", "stale": []}


def numerics(sketches=None, loss=1.0, data=1, **looks):
    gradients = {"silent": [], "sketches": sketches or {}, "loss": loss, "data": data, "random": "r", "apart": ""}
    alone = {look: [] for look in ("products", "later", "evaluated", "evaluated_later")}
    return {**alone, **looks, "gradients": gradients, "moved": None}


def sketches(**of):
    return {name: b64encode(array("f", values).tobytes()).decode() for name, values in of.items()}


# -- what must be alike ------------------------------------------------------------------------------------------------

APART = curve(norms=(1.0, 0.9), weights={"w": "a"})
FEWER = [curve(fp8=6, calls={"fp8": [0], "other": [0]}), curve(fp8=5, other=2, calls={"fp8": [0], "other": [0]})]


@pytest.mark.parametrize(
    ("operation", "answers", "what", "cause"),
    [
        ("curve", [curve(), curve(norms=(1.0, 0.6))], "gradient norms[1]", "gradients are not reduced"),
        ("curve", [curve(), curve(stepped=[2])], "stepped[0]", "its step does something else"),
        ("curve", [curve(), curve(rates=[{"lr": [1e-4]}])], "rates[0], lr[0]", "its step does something else"),
        ("curve", [curve(), curve(fp8=5, other=2)], "products of forward", "FP8 is off there"),
        ("curve", FEWER, "products of forward", "FP8 is off there"),
        # Replicas that go apart; with other weights, gradients are why.
        ("curve", [curve(weights={"w": "1"}), curve(weights={"w": "2"})], "weights, w", ""),
        ("curve", [APART, curve(norms=(1.0, 0.6), weights={"w": "b"})], "gradient norms[1]", ""),
        (
            "curve",
            [{**APART, "weights": {"w": ""}}, curve(norms=(1.0, 0.6), weights={"w": ""})],
            "gradient norms[1]",
            "",
        ),
        ("layers", [layers(), layers(kinds=("fp8", "bfloat16", "bfloat16"))], "products of forward", ""),
        ("layers", [layers(), layers(recipes={"a": {"recipe": "off"}})], "recipes, a, recipe", "otherwise"),
        # Lists of other lengths, and what only another rank has.
        ("layers", [layers(live_fp8=["up", "down", "head"]), layers(live_fp8=["up", "head"])], "live fp8[1]", ""),
        ("save", [SAVED, {**SAVED, "digests": {"w": 1, "v": 3}}], "digests, v", ""),
    ],
)
def test_a_rank_that_differs_is_named_with_what_differs(operation, answers, what, cause):
    with pytest.raises(RanksDisagree) as found:
        merged(operation, answers)
    assert (found.value.rank, found.value.what) == (1, what)
    assert cause in found.value.cause
    assert found.value.next_step
    shown = {"digests, v": ("None", "3"), "live fp8[1]": ("down", "head")}
    assert what not in shown or (found.value.first, found.value.other) == shown[what]


@pytest.mark.parametrize(
    ("operation", "answer", "apart"),
    [
        ("build", BUILT, []),
        ("ledger", LEDGER, OF_EACH + OWN),
        ("layers", layers(), layers().keys() - set(AS_BUILT)),
        ("save", SAVED, []),
        ("load", LOADED, ["stale"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_all_ranks_must_say_alike_what_is_not_each_one_s_own(operation, answer, apart):
    assert merged(operation, [answer, answer])
    for key in answer.keys() - set(apart):
        changed = {"classes": {"layer": "other"}, "before": OTHER, "after": OTHER}.get(key, "other")
        with pytest.raises(RanksDisagree) as found:
            merged(operation, [answer, {**answer, key: changed}])
        assert found.value.what.partition(",")[0] == key.replace("_", " ")


# -- what may differ, and numbers of all ranks ------------------------------------------------------------------------

ROUTED = {**LEDGER, "routed": ["expert"]}
OWN_STATE = {"w": {**WEIGHT, "hooks": 1}, "mean": {**WEIGHT, "buffer": True, "digest": "of rank 1"}}
MORE = {"operators": {"": {"aten::add": 2}, "up": {"aten::mul": 1}}, "products": [{"owner": "up"}], "backward": 3}
CALLS = [
    {"fp8": fp8, "other": [0, 0], "looks": looks}
    for fp8, looks in (
        ([2, 2], {"a": [0.1]}),
        ([2, 1], {"a": [0.2], "b": [0.9]}),
        ([4, 3], {"a": [0.1, 0.2], "b": [0.9]}),
    )
]
"""Of two ranks, and of both."""


GATHER, REDUCE, ALL = "all-gather", "reduce-scatter", "all-reduce"


def rank(own, *collectives, idle=0.0):
    """What a rank says of one step: milliseconds of its own kernels, of its collectives by kind, and without any."""
    busy = own + sum(ms for _, ms in collectives)
    return {"step_ms": [busy + idle], "busy_ms": [busy], "compute_ms": [own], "collectives": [[*collectives]]}


TIMES = ("step_ms", "busy_ms", "compute_ms")


def times(step, busy, compute):
    return dict(zip(TIMES, ([step], [busy], [compute]), strict=True))


WAITS = layers(milliseconds={"busy": 100.4}, exposed_ms=20.0, **rank(80.4, (GATHER, 20.0), idle=1.6))
WORKS = layers(milliseconds={"busy": 100.0}, exposed_ms=1.0, **rank(99.0, (GATHER, 1.0), idle=2.0))
TWO_STEPS = {name: [*values, *values] for name, values in rank(90.0, (GATHER, 5.0)).items()}
PEAKS = [{"peak_allocated": 10, "resident": 5}, {"peak_allocated": 12, "resident": 4}]


@pytest.mark.parametrize(
    ("operation", "answers", "told"),
    [
        ("ledger", [ROUTED, {**ROUTED, **dict.fromkeys(WORK, "other")}], {}),
        # A rank whose batch has no image calls fewer modules; hooks may log on one, and buffers hold its own values.
        ("ledger", [LEDGER, {**LEDGER, "classes": {**LEDGER["classes"], "vision": "Linear"}}], {}),
        ("ledger", [LEDGER, {**LEDGER, "before": OWN_STATE, "after": OWN_STATE}], {"before": LEDGER["before"]}),
        (
            "ledger",
            [LEDGER, {**LEDGER, **MORE}],
            {"operators": {"": {"aten::add": 3}, "up": {"aten::mul": 1}}, "products": [{"owner": "up"}], "backward": 4},
        ),
        ("layers", [layers(), layers(dropped_behaviour={"a": "a hook"})], {"dropped_behaviour": {"a": "a hook"}}),
        # A layer in high precision in place of one in FP8; a router that gives one rank's experts less; a layer that
        # one rank never called.
        ("layers", [layers(), layers(kinds=("fp8", "bfloat16", "bfloat16"), called=("a", "null"))], {}),
        ("layers", [layers(), layers(kinds=("fp8", "bfloat16"))], {}),
        ("layers", [layers(), layers(recipes={})], {}),
        (
            "curve",
            [{**each, "calls": {"fp8": [5], "other": [0], "looks": {}}} for each in FEWER],
            {"last_products": {"forward": {"fp8": 11, "other": 3}}},
        ),
        ("curve", [curve(calls=each) for each in CALLS[:2]], {"calls": CALLS[2]}),
        # Each rank's own norms, which an optimizer reduces, and the same weights on all.
        ("curve", [APART, curve(norms=(1.0, 0.6), weights={"w": "a"})], {"gradient_norms": [1.0, 0.9]}),
        # An optimizer may keep the state of a weight on one rank.
        (
            "curve",
            [curve(state={"w": ""}), curve(state={"v": ""})],
            {"course": curve(state={"w": "", "v": ""})["course"]},
        ),
        # A loss is the mean over the whole batch, a time the slowest rank's, memory that of the worst one.
        ("curve", [curve((3.0, 2.0)), curve((5.0, 2.5))], {"losses": [4.0, 2.25]}),
        ("blocks", [timed([10.0, 12.0]), timed([11.0, 9.0], 2, 1)], timed([11.0, 12.0], 2, 1)),
        ("memory", PEAKS, PEAKS[1]),
        ("layers", [layers(busy=10.0), layers(busy=14.0)], layers(busy=14.0, collectives=[])),
        # Rank 1 computes longer. Rank 0 waits for it in its collectives, and is busy for as long.
        ("layers", [WAITS, WORKS], {"milliseconds": {"busy": 100.0}, "exposed_ms": 1.0, **times(102.0, 100.0, 99.0)}),
        # A profile that lost a mark: the slowest rank is told.
        ("busy", [TWO_STEPS, rank(180.0, (GATHER, 10.0), (GATHER, 9.0))], times(199.0, 199.0, 180.0)),
    ],
)
def test_what_ranks_say_of_their_own_becomes_one_and_is_no_difference(operation, answers, told):
    found = merged(operation, answers)
    assert {name: found[name] for name in told} == told
    assert "weights" not in found or operation != "curve"


def test_gradients_that_no_backward_pass_reduced_are_compared_as_their_mean():
    own, others, both = (sketches(v=[x, 0.0], w=[3 * x, 4 * x]) for x in (1.0, 3.0, 2.0))
    told = merged("numerics", [numerics(own), numerics({**others, **sketches(vision=[2.0])})])["gradients"]
    assert told["sketches"] == {**both, **sketches(vision=[1.0])}, "the other rank adds nothing"
    assert told["apart"] == "rank 1: sketches, v"
    assert merged("numerics", [numerics(both)] * 2)["gradients"]["apart"] == ""


def test_which_rank_was_given_what_counts():
    pairs = ((1, 2), (2, 1), (1, 3))
    assert len({merged("curve", [curve(data=data) for data in pair])["data"] for pair in pairs}) == 3


def test_products_of_all_ranks_are_judged():
    looks = ("products", "later", "evaluated", "evaluated_later")
    told = merged("numerics", [numerics(loss=rank, **{look: [look, rank] for look in looks}) for rank in (1.0, 2.0)])
    assert [told[look] for look in looks] == [[look, 1.0, look, 2.0] for look in looks]
    assert told["gradients"]["loss"] == 1.5


LATE = (
    rank(350.0, (ALL, 8.0), (GATHER, 5.0), (ALL, 0.1), idle=12.0),
    rank(349.0, (ALL, 0.1), (GATHER, 5.0), (ALL, 12.0), idle=9.0),
)


@pytest.mark.parametrize(
    ("ranks", "busy"),
    [
        # As with FP8 all-gather on two H100s: each weight's all-reduce waits for whichever rank comes later, while that
        # one's GPU is idle. Neither the 8 ms of one nor the 12 of the other is work.
        (LATE, 350 + 5 + 2 * 0.1),
        # Collectives that overlap are busy whichever began first.
        ((rank(50.0, (GATHER, 100.0), (REDUCE, 0.0)), rank(50.0, (GATHER, 0.0), (REDUCE, 100.0))), 150.0),
        # What one rank alone counts to this step is its own.
        ((rank(90.0, (GATHER, 5.0), (GATHER, 4.0), idle=20.0), rank(90.0, (GATHER, 3.0), idle=26.0)), 97.0),
    ],
)
def test_ranks_that_wait_for_each_other_are_not_busy(ranks, busy):
    for each in (ranks, ranks[::-1]):
        assert merged("busy", each)["busy_ms"] == [pytest.approx(busy)]
    of_layers = merged("layers", [layers(**each) for each in LATE])
    assert [of_layers[key] for key in TIMES] == [[pytest.approx(375.1)], [pytest.approx(355.2)], [350.0]]
