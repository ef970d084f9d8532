"""Ranks of an arm that answer otherwise: what must be alike is named, what may differ is sound. Pure."""

from __future__ import annotations

import math
from array import array
from base64 import b64encode

import pytest

from helpers.answers import curve, layers
from pytest_fp8.arms.merging import RanksDisagree, merged

BUILT = {
    **dict.fromkeys(("libraries", "parameters", "compiled", "own_checkpoints", "foreign_parameters"), "a"),
    "seconds": {"build": 1.0},
}
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


@pytest.mark.parametrize(
    ("operation", "answers", "what", "cause"),
    [
        (
            "curve",
            [curve(), curve(norms=(1.0, 0.6))],
            "gradient norms[1]",
            "gradients are not reduced",
        ),
        ("curve", [curve(), curve(stepped=[2])], "stepped[0]", "its step does something else"),
        ("curve", [curve(), curve(rates=[[1e-4]])], "rates[0][0]", "its step does something else"),
        ("curve", [curve(), curve(fp8=5, other=2)], "products of forward", "FP8 is off there"),
        ("layers", [layers(), layers(kinds=("bfloat16",) * 3)], "products of forward", "FP8 is off there"),
        ("layers", [layers(), layers(live_fp8=["b"])], "live fp8[0]", "converted or switched otherwise"),
        ("layers", [layers(), layers(recipes={"a": {"recipe": "off"}})], "recipes, a, recipe", "otherwise"),
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
        assert found.value.what.partition(",")[0] == key.replace("_", " ")


def test_a_router_may_give_ranks_other_work():
    routed = {**LEDGER, "routed": ["expert"]}
    assert merged("ledger", [routed, {**routed, **dict.fromkeys(WORK, "other")}])


def test_buffers_may_hold_a_rank_s_own_values_and_hooks_may_log_on_one():
    own = {"w": {**WEIGHT, "hooks": 1}, "mean": {**WEIGHT, "buffer": True, "digest": "of rank 1"}}
    told = merged("ledger", [LEDGER, {**LEDGER, "before": own, "after": own}])
    assert told["before"] == LEDGER["before"]
    dropped = [layers(), layers(dropped_behaviour={"a": "a hook"})]
    assert merged("layers", dropped)["dropped_behaviour"] == {"a": "a hook"}


def test_ranks_may_do_other_work_and_all_of_it_counts():
    here = {"operators": {"": {"aten::add": 2}, "up": {"aten::mul": 1}}, "products": [{"owner": "up"}], "backward": 3}
    told = merged("ledger", [LEDGER, {**LEDGER, **here}])
    assert told["operators"] == {"": {"aten::add": 3}, "up": {"aten::mul": 1}}
    assert (told["products"], told["backward"]) == ([{"owner": "up"}], 4)


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
    assert (found.value.what, found.value.first, found.value.other) == ("digests, v", "nothing", "3")


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
    assert told["apart"] == "rank 1: sketches, v"
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
        assert found.value.what.startswith("gradient norms")


def test_replicas_that_go_apart_are_told():
    with pytest.raises(RanksDisagree) as found:
        merged("curve", [curve(weights={"w": "1"}), curve(weights={"w": "2"})])
    assert found.value.what == "weights, w"
    assert "weights" not in merged("curve", [curve(weights={"w": "1"})] * 2)


def test_a_rank_whose_batch_has_no_image_calls_fewer_modules():
    assert merged("ledger", [LEDGER, {**LEDGER, "classes": {**LEDGER["classes"], "vision": "Linear"}}])


def test_of_lists_of_other_lengths_what_one_lacks_is_named():
    with pytest.raises(RanksDisagree) as found:
        merged("layers", [layers(live_fp8=["up", "down", "head"]), layers(live_fp8=["up", "head"])])
    assert (found.value.what, found.value.first, found.value.other) == ("live fp8", "down", "2 entries")


def test_a_router_may_give_one_ranks_experts_less():
    """Fewer products in FP8 and no more in high precision: that FP8 is off would look otherwise."""
    assert merged("layers", [layers(), layers(kinds=("fp8", "bfloat16"))])


def test_a_layer_that_one_rank_never_called_has_a_recipe_on_the_others():
    assert merged("layers", [layers(), layers(recipes={})])
