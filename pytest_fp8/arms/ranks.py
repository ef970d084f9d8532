"""What an arm of several ranks has besides: torchrun's variables, and what is said where one of them fails. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pytest_fp8.arms.output import STACK
from pytest_fp8.arms.spec import STORE
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError

CONSEQUENCE = re.compile(r"closed by peer|reset by peer|Broken pipe|gloo|NCCL|DistBackendError|DistNetworkError", re.I)
"""What a rank says whose partner has failed."""
OTHER_COLLECTIVES = re.compile(r"collective mismatch|Received data size doesn't match|op\.preamble\.length", re.I)
"""What gloo says of ranks whose calls do not fit together."""
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


class First(Protocol):
    """Rank 0's process."""

    folder: Path
    temporary: str


def variables(rank: int, ranks: int, first: First | None) -> dict[str, str]:
    """A rank's variables, as ``torchrun`` sets them. Rank i takes the i-th GPU that this process sees. ``first``: rank
    0's process, for all others."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        # Libraries ask whether they are there. Nobody listens.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        **({STORE: str(first.folder / "store")} if first else {}),
        # As under torchrun: what rank 0 prepares in the temporary folder, the others find.
        **({"TMPDIR": first.temporary} if first and first.temporary else {}),
    }


def began(errors: Mapping[int, ArmError]) -> ArmError:
    """The error that the others follow from: a death or a lack of memory first, a broken connection last."""
    first = (R.ARM_DIED, R.OUT_OF_MEMORY)

    def order(rank: int) -> tuple[bool, bool, int]:
        return errors[rank].code not in first, bool(CONSEQUENCE.search(errors[rank].seen)), rank

    return errors[min(errors, key=order)]


def explained(error: ArmError, name: str, asked: str) -> ArmError:
    """Whichever rank notices collectives that do not fit together is ended by gloo: it is not known to be the one that
    began."""
    if not OTHER_COLLECTIVES.search(error.seen):
        return error
    return ArmError(
        R.OTHER_COLLECTIVES,
        f"the ranks of the arm {name!r} called other collectives than each other, or with other sizes, while they were "
        f"asked to {asked!r}",
        expected="the same collectives of the same sizes in the same order on every rank",
        seen=error.seen,
        cause="a rank that goes another way: it skips, freezes or leaves unconverted what the others do not; or "
        "float8_all_gather, where the ranks cannot share the rows of a weight evenly",
        next_step=f"run the same case alone with -k, and with {DETAIL}",
    )


def hung(name: str, asked: str, seconds: float, ranks: int, tails: Mapping[int, str]) -> ArmError:
    """Names the rank that keeps the others waiting. ``tails``: the end of the output of each rank that gave no answer,
    with its stack."""
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
