"""What the ranks of an arm answer, as one answer: the whole batch's losses, and the worst of each number. Pure."""

from __future__ import annotations

import pytest

from helpers.answers import curve, layers
from helpers.fakes import timed
from pytest_fp8.arms.merging import merged


def test_a_loss_is_the_mean_over_the_whole_batch():
    told = merged("curve", [curve((3.0, 2.0), data=1), curve((5.0, 2.5), data=2)])
    assert told["losses"] == [4.0, 2.25]
    swapped = merged("curve", [curve(data=2), curve(data=1)])
    assert told["data"] != swapped["data"], "which rank was given what counts"


def test_a_time_is_the_slowest_ranks():
    blocks = [
        timed([10.0, 12.0]),
        timed([11.0, 9.0], 2, 1),
    ]
    assert merged("blocks", blocks) == timed([11.0, 12.0], 2, 1)
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
        return {**looks, "gradients": gradients, "moved": None}

    told = merged("numerics", [numerics(1), numerics(2)])
    assert (told["products"], told["later"]) == ([1, 2], [-1, -2])
    assert (told["evaluated"], told["evaluated_later"]) == ([10, 20], [-10, -20])
    assert told["gradients"]["loss"] == 1.5
