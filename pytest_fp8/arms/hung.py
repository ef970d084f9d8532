"""Which rank of an arm keeps the others waiting, by the stacks of those that gave no answer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pytest_fp8.arms.output import STACK
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError

WAITING = re.compile(
    r"torch/distributed/|torch/nn/parallel/distributed\.py|in _engine_run_backward$"
    r"|torch/cuda/\S+ line \d+ in synchronize$"
)
"""The innermost call of a rank that waits for the others: a collective, DDP's own forward pass, the backward pass, or
the GPU, on which a collective may stand. Calls of the user's lie further in, also where a wrapper of torch's or the
backward pass makes them."""

DETAIL = (
    "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment: torch compares what the ranks call, and names what differs; "
    "under DDP on a CPU torch 2.13 crashes with it"
)


def hung(name: str, asked: str, seconds: float, ranks: int, tails: Mapping[int, str]) -> ArmError:
    """``tails``: the end of the output of each rank that gave no answer, with its stack."""
    elsewhere = [rank for rank, tail in tails.items() if not WAITING.search(innermost(tail))]
    others = [rank for rank in tails if rank not in elsewhere]
    if len(elsewhere) == 1:
        what = f"rank {elsewhere[0]} hangs"
        if others:
            what += f", and {_ranks(others)} {'wait' if others[1:] else 'waits'} for it"
    else:
        what = f"{_ranks([*tails])} gave none, and their stacks do not say which of them began"
    return ArmError(
        R.ARM_HUNG,
        f"the arm {name!r} gave no answer to {asked!r} in {seconds:.0f} s and was stopped: {what}",
        expected=f"an answer of all {ranks} ranks within {seconds:.0f} s",
        seen="\n".join(f"the end of the output of rank {rank}:\n{tails[rank]}" for rank in [*elsewhere, *others]),
        cause="a deadlock: collectives that not every rank calls, or calls in another order; or work far slower "
        "than planned. The stacks above say where each rank was",
        next_step=f"run the same case alone with -k, and with {DETAIL}",
    )


def innermost(tail: str) -> str:
    """The innermost call of the last stack of :mod:`faulthandler`, ``File "...", line 1 in name``; empty where there is
    none."""
    stack: list[str] = []
    for line in tail.splitlines():
        if STACK.match(line):
            stack = []
        elif line.lstrip().startswith("File "):
            stack.append(line.strip())
    return stack[0] if stack else ""


def _ranks(which: list[int]) -> str:
    return f"rank{'s' if which[1:] else ''} {', '.join(map(str, which))}"
