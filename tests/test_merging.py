"""What the ranks of an arm answer, as one answer: the worst of each, and who says otherwise. Pure."""

from __future__ import annotations

import math
from array import array
from base64 import b64encode

import pytest

from helpers.fakes import timed
from pytest_fp8.arms.disagreement import _WORDS, RanksDisagree
from pytest_fp8.arms.merging import merged


def curve(losses=(3.0, 2.0), norms=(1.0, 0.5), data=1, fp8=6, other=1, weights=None, **course):
    counts = {"forward": {"fp8": fp8, "other": other}}
    return {
        "losses": list(losses),
        "gradient_norms": list(norms),
        "data": data,
        "weights": weights or {},
        "course": {"rates": [[1e-3]], "stepped": [1], "state": {}, "left": [], "alone": {}, **course},
        "movement": {"w": {"elements": 8, "moved": 0.5, "reached": 1.0}},
        "first_products": counts,
        "last_products": counts,
        "calls": {"fp8": [fp8], "other": [other], "looks": {}},
    }


def layers(kinds=("fp8", "fp8", "bfloat16"), busy=10.0, called=("a",), **changes):
    alike = {key: ["a"] for key in ("originals", "converted", "skipped", "live_fp8", "kinds", "in_eval")}
    return {
        **alike,
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


BUILT = {
    **dict.fromkeys(("libraries", "parameters", "compiled", "own_checkpoints"), "a"),
    "seconds": {"build": 1.0},
}
WORK = ("stepped", "gradients")
OF_EACH = ("batch", "entered", "calls", "products", "recomputed_otherwise", "uncertain", "waits", "loss", "random")
OWN = ("operators", "backward")
WEIGHT = {"buffer": False, "digest": "a", "hooks": 0}
LEDGER = {
    **dict.fromkeys(("optimizer", "fp8_layers", "linears", "watched", "loss_dtype", "switches", *WORK), "a"),
    **{when: {"w": WEIGHT, "mean": {**WEIGHT, "buffer": True}} for when in ("before", "after")},
    "operators": {"": {"aten::add": 1}},
    "backward": 1,
    "classes": {"layer": "Linear"},
    **{key: [] for key in OF_EACH[:5]},
    "uncertain": False,
    "waits": {},
    "loss": 1.0,
    "random": "r",
}
OTHER = {**LEDGER["before"], "w": {**WEIGHT, "digest": "b"}}
SAVED = {"keys": ["w"], "digests": {"w": 1}, "optimizer_digests": {"w": 2}}
LOADED = {**SAVED, **{key: [] for key in ("missing", "unexpected", "wrong_shape", "stale")}, "loaded": True}
del LOADED["keys"]


# -- the worst rank, and the whole batch --------------------------------------------------------------------------


def test_a_loss_is_the_mean_over_the_whole_batch():
    told = merged("curve", [curve((3.0, 2.0), data=1), curve((5.0, 2.5), data=2)])
    assert told["losses"] == [4.0, 2.25]
    swapped = merged("curve", [curve(data=2), curve(data=1)])
    assert told["data"] != swapped["data"], "which rank was given what counts"


def test_a_time_is_the_slowest_ranks():
    blocks = [
        timed([10.0, 12.0], ahead=0.3, wall=1.0, waited=0.2),
        timed([11.0, 9.0], 2, 1, ahead=0.1, wall=1.1, waited=0.1),
    ]
    assert merged("blocks", blocks) == timed([11.0, 12.0], 2, 1, ahead=0.1, wall=1.1, waited=0.2)
    told = merged("layers", [layers(busy=10.0), layers(busy=14.0)])
    assert (told["milliseconds"], told["step_ms"], told["busy_ms"]) == ({"busy": 14.0}, [15.0], [14.0])
    assert told["waits"] == {"cudaStreamSynchronize": 14}
    assert (told["wire"][0]["milliseconds"], told["exposed_ms"]) == (7.0, 1.4), "of the same rank as its step"


def rank(own, *collectives, idle=0.0):
    """What a rank says of one step: milliseconds of its own kernels, of its collectives by kind, and without any."""
    busy = own + sum(ms for _, ms in collectives)
    return {"step_ms": [busy + idle], "busy_ms": [busy], "compute_ms": [own], "collectives": [[*collectives]]}


GATHER, REDUCE = "all-gather", "reduce-scatter"


def test_times_of_the_profiled_step_are_those_of_one_rank():
    """Rank 1 computes longer. Rank 0 waits for it in its collectives, and is busy for as long."""
    waits = layers(milliseconds={"busy": 100.4}, exposed_ms=20.0, **rank(80.4, (GATHER, 20.0), idle=1.6))
    works = layers(milliseconds={"busy": 100.0}, exposed_ms=1.0, **rank(99.0, (GATHER, 1.0), idle=2.0))
    told = merged("layers", [waits, works])
    assert [told[key] for key in ("milliseconds", "exposed_ms")] == [{"busy": 100.0}, 1.0]
    assert [told[key] for key in ("step_ms", "busy_ms", "compute_ms")] == [[102.0], [100.0], [99.0]]


@pytest.mark.parametrize("operation", ["busy", "layers"])
def test_ranks_that_wait_for_each_others_hosts_are_not_busy(operation):
    """As with FP8 all-gather on two H100s: each weight's all-reduce waits for whichever rank comes later, while that
    one's GPU is idle."""
    one = rank(350.0, ("all-reduce", 8.0), (GATHER, 5.0), ("all-reduce", 0.1), idle=12.0)
    other = rank(349.0, ("all-reduce", 0.1), (GATHER, 5.0), ("all-reduce", 12.0), idle=9.0)
    told = merged(operation, [layers(**each) if operation == "layers" else each for each in (one, other)])
    assert told["step_ms"] == [pytest.approx(375.1)]
    assert told["busy_ms"] == [pytest.approx(350 + 5 + 2 * 0.1)], "neither the 8 ms of one nor the 12 of the other"
    assert told["compute_ms"] == [350.0]


def test_ranks_that_compute_in_turn_are_busy_though_each_waits():
    """As where a router loads one layer on one rank and the next on the other: no GPU is ever idle."""
    one, other = rank(100.0, (REDUCE, 1.0), (REDUCE, 21.0)), rank(100.0, (REDUCE, 21.0), (REDUCE, 1.0))
    assert merged("busy", [one, other])["busy_ms"] == [122.0]


def test_collectives_that_overlap_are_busy_whichever_began_first():
    one, other = rank(50.0, (GATHER, 100.0), (REDUCE, 0.0)), rank(50.0, (GATHER, 0.0), (REDUCE, 100.0))
    assert merged("busy", [one, other])["busy_ms"] == [150.0]


@pytest.mark.parametrize("order", [1, -1])
def test_collectives_of_two_kinds_may_begin_in_either_order(order):
    each = [(GATHER, 5.0), (REDUCE, 3.0)]
    ranks = rank(90.0, *each, idle=20.0), rank(90.0, *each[::order], idle=20.0)
    assert merged("busy", ranks)["busy_ms"] == [98.0]


def test_what_one_rank_alone_counts_to_this_step_is_its_own():
    ranks = rank(90.0, (GATHER, 5.0), (GATHER, 4.0), idle=20.0), rank(90.0, (GATHER, 3.0), idle=26.0)
    assert merged("busy", ranks)["busy_ms"] == [97.0]


def test_where_a_profile_lost_a_mark_the_slowest_rank_is_told():
    whole = {name: [*values, *values] for name, values in rank(90.0, (GATHER, 5.0)).items()}
    lost = rank(180.0, (GATHER, 10.0), (GATHER, 9.0))
    told = merged("busy", [whole, lost])
    assert [told[key] for key in ("step_ms", "busy_ms", "compute_ms")] == [[199.0], [199.0], [180.0]]


def test_memory_is_the_worst_ranks():
    peaks = [{"peak_allocated": 10, "resident": 5}, {"peak_allocated": 12, "resident": 4}]
    assert merged("memory", peaks) == peaks[1]


def test_products_of_all_ranks_are_judged():
    def numerics(rank):
        gradients = {"silent": [], "sketches": {"w": "same"}, "loss": float(rank), "data": rank, "random": "r"}
        looks = {"products": [rank], "later": [-rank], "evaluated": [10 * rank], "evaluated_later": [-10 * rank]}
        return {**looks, "gradients": gradients, "moved": None, "outputs": {}}

    told = merged("numerics", [numerics(1), numerics(2)])
    assert (told["products"], told["later"]) == ([1, 2], [-1, -2])
    assert (told["evaluated"], told["evaluated_later"]) == ([10, 20], [-10, -20])
    assert told["gradients"]["loss"] == 1.5


def test_what_needs_no_merging_is_rank_0s():
    assert merged("logits", [b"rank 0", b"rank 1"]) == b"rank 0"


# -- who says otherwise -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "answers", "what", "cause"),
    [
        (
            "curve",
            [curve(), curve(norms=(1.0, 0.6))],
            "the gradients' norm, step by step[1]",
            "gradients are not reduced",
        ),
        ("curve", [curve(), curve(stepped=[2])], "optimizer steps[0]", "its training step does something else"),
        ("curve", [curve(), curve(rates=[[1e-4]])], "learning rates[0][0]", "its training step does something else"),
        ("curve", [curve(), curve(fp8=5, other=2)], "products of forward", "FP8 is off on one of them"),
        ("layers", [layers(), layers(kinds=("bfloat16",) * 3)], "products of forward", "FP8 is off on one of them"),
        ("layers", [layers(), layers(live_fp8=["b"])], "FP8 layers[0]", "built or converted otherwise"),
        ("layers", [layers(), layers(recipes={"a": {"recipe": "off"}})], "recipe in force, a, recipe", "otherwise"),
    ],
)
def test_a_rank_that_differs_is_named_with_what_differs(operation, answers, what, cause):
    with pytest.raises(RanksDisagree) as found:
        merged(operation, answers)
    assert found.value.rank == 1
    assert found.value.what == what
    assert cause in found.value.cause
    assert found.value.next_step


@pytest.mark.parametrize(
    ("operation", "answer", "apart"),
    [
        ("build", BUILT, ["seconds"]),
        ("ledger", LEDGER, OF_EACH + OWN),
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
        assert found.value.what.partition(",")[0] in (key, _WORDS.get(key))


def test_a_router_may_give_ranks_other_work():
    routed = {**LEDGER, "uncertain": True}
    assert merged("ledger", [routed, {**routed, **dict.fromkeys(WORK, "other")}])


def test_buffers_may_hold_a_rank_s_own_values_and_hooks_may_log_on_one():
    own = {"w": {**WEIGHT, "hooks": 1}, "mean": {**WEIGHT, "buffer": True, "digest": "of rank 1"}}
    told = merged("ledger", [LEDGER, {**LEDGER, "before": own, "after": own}])
    assert told["before"] == LEDGER["before"]
    dropped = [layers(), layers(dropped_behaviour={"a": "a hook"})]
    assert merged("layers", dropped)["dropped_behaviour"] == {"a": "a hook"}


def test_ranks_may_do_other_work_and_all_of_it_counts():
    here = {"operators": {"": {"aten::add": 2}, "up": {"aten::mul": 1}}, "products": [{"routed": False}], "backward": 3}
    told = merged("ledger", [LEDGER, {**LEDGER, **here}])
    assert told["operators"] == {"": {"aten::add": 3}, "up": {"aten::mul": 1}}
    assert (told["products"], told["backward"]) == ([{"routed": False}], 4)


def test_a_rank_may_call_a_layer_in_high_precision_in_place_of_one_in_fp8():
    other = layers(kinds=("fp8", "bfloat16", "bfloat16"), called=("a", "null"))
    assert merged("layers", [layers(), other])
    with pytest.raises(RanksDisagree):
        merged("layers", [layers(), {**other, "calls": layers()["calls"]}])
    compiled = [curve(fp8=6), curve(fp8=5, other=2)]
    for told in compiled:
        told["calls"] = {"fp8": [0], "other": [0], "looks": {}}
    with pytest.raises(RanksDisagree):
        merged("curve", compiled)
    for told in compiled:
        told["calls"] = {"fp8": [5], "other": [0], "looks": {}}
    assert merged("curve", compiled)["last_products"] == {"forward": {"fp8": 11, "other": 3}}


def test_calls_of_all_ranks_are_judged_step_by_step():
    first, other = curve(), curve()
    first["calls"] = {"fp8": [2, 2], "other": [0, 0], "looks": {"a": [0.1]}}
    other["calls"] = {"fp8": [2, 1], "other": [0, 0], "looks": {"a": [0.2], "b": [0.9]}}
    told = merged("curve", [first, other])["calls"]
    assert told == {"fp8": [4, 3], "other": [0, 0], "looks": {"a": [0.1, 0.2], "b": [0.9]}}


def test_an_optimizer_may_keep_a_weight_s_state_on_one_rank():
    told = merged("curve", [curve(state={"w": "m float32"}), curve(state={"v": "m float32"})])
    assert told["course"]["state"] == {"w": "m float32", "v": "m float32"}


def test_what_only_another_rank_has_is_named():
    with pytest.raises(RanksDisagree) as found:
        merged("save", [SAVED, {**SAVED, "digests": {"w": 1, "v": 3}}])
    assert (found.value.what, found.value.first, found.value.other) == ("stored weights, v", "nothing", "3")


def test_a_shard_that_another_rank_loads_otherwise_is_named_by_its_weight():
    saved = {"keys": ["w"], "digests": {"v": 1, "w": 2}, "optimizer_digests": {}}
    with pytest.raises(RanksDisagree) as found:
        merged("save", [saved, saved, {**saved, "digests": {"v": 1, "w": 3}}])
    assert (found.value.rank, found.value.what) == (2, "stored weights, w")
    assert (found.value.first, found.value.other) == ("2", "3")


def test_a_number_that_is_none_on_every_rank_is_no_difference():
    told = merged("curve", [curve(norms=(1.0, math.nan)), curve(norms=(1.0, float("nan")))])
    assert math.isnan(told["gradient_norms"][1])


def sketches(**of):
    return {name: b64encode(array("f", values).tobytes()).decode() for name, values in of.items()}


def numerics(here):
    gradients = {"silent": [], "sketches": here, "loss": 1.0, "data": 1, "random": "r", "apart": ""}
    looks = {key: [] for key in ("products", "later", "evaluated", "evaluated_later")}
    return {**looks, "gradients": gradients, "moved": None}


def test_gradients_that_no_backward_pass_reduced_are_compared_as_their_mean():
    own, others, both = (sketches(v=[x, 0.0], w=[3 * x, 4 * x]) for x in (1.0, 3.0, 2.0))
    told = merged("numerics", [numerics(own), numerics({**others, **sketches(vision=[2.0])})])["gradients"]
    assert told["sketches"] == {**both, **sketches(vision=[1.0])}, "the other rank adds nothing"
    assert told["apart"] == "rank 1: gradients of one step, v: a gradient of norm 3; on rank 0 a gradient of norm 1"
    assert merged("numerics", [numerics(both)] * 2)["gradients"]["apart"] == ""


def test_gradients_that_an_optimizer_reduces_leave_the_ranks_the_same_weights():
    """Each rank's own norms, and the same weights on all: nothing is wrong. With other weights, gradients are why."""
    apart = [curve(norms=(1.0, 0.9), weights={"w": "a"}), curve(norms=(1.0, 0.6), weights={"w": "a"})]
    assert merged("curve", apart)["gradient_norms"] == [1.0, 0.9]
    for weights in ({"w": "b"}, {"w": ""}):
        with pytest.raises(RanksDisagree) as found:
            merged(
                "curve", [apart[0] | {"weights": {"w": "a" if weights["w"] else ""}}, apart[1] | {"weights": weights}]
            )
        assert found.value.what.startswith("the gradients' norm")


def test_replicas_that_go_apart_are_told():
    with pytest.raises(RanksDisagree) as found:
        merged("curve", [curve(weights={"w": "1"}), curve(weights={"w": "2"})])
    assert found.value.what == "weights after training, w"
    assert "replicas go apart" in found.value.cause
    assert "weights" not in merged("curve", [curve(weights={"w": "1"})] * 2)


def test_a_rank_whose_batch_has_no_image_calls_fewer_modules():
    assert merged("ledger", [LEDGER, {**LEDGER, "classes": {**LEDGER["classes"], "vision": "Linear"}}])


def test_of_lists_of_other_lengths_what_one_lacks_is_named():
    with pytest.raises(RanksDisagree) as found:
        merged("layers", [layers(live_fp8=["up", "down", "head"]), layers(live_fp8=["up", "head"])])
    assert (found.value.what, found.value.first, found.value.other) == ("FP8 layers", "down", "2 entries")


def test_a_mode_that_one_rank_alone_is_in_is_told_as_such():
    with pytest.raises(RanksDisagree) as found:
        merged("layers", [layers(in_eval=[]), layers(in_eval=["down"])])
    assert (found.value.what, found.value.other) == ("modules in eval mode", "down")
    assert "model.eval()" in found.value.cause


def test_a_router_may_give_one_ranks_experts_less():
    """Fewer products in FP8 and no more in high precision: that FP8 is off would look otherwise."""
    assert merged("layers", [layers(), layers(kinds=("fp8", "bfloat16"))])


def test_a_layer_that_one_rank_never_called_has_a_recipe_on_the_others():
    assert merged("layers", [layers(), layers(recipes={})])
