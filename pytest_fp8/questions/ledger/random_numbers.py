"""Where the arms' random numbers go apart: the first operator that drew others, and why it may have. Pure."""

from __future__ import annotations

from pytest_fp8.codes import D
from pytest_fp8.questions.ledger.differences import INVALID, LAYERS, LOSS, Difference, size
from pytest_fp8.questions.ledger.evidence import Draw, TwoLedgers
from pytest_fp8.recipes import RECOMPUTE

SIZES = "dropout, noise or sampling in one arm alone, or of other sizes"
SEEDED = (
    "the generator was seeded again inside the step (torch.manual_seed), or something that is no operator of torch's "
    "drew from it"
)
NOT_RESTORED = (
    "recomputation draws other numbers than its forward pass: it does not restore the generator "
    "(checkpoint(..., preserve_rng_state=False)), or a generator is seeded again inside the step"
)


def drawn_otherwise(ledgers: TwoLedgers) -> Difference:
    """The first draw that differs. Asked where the generators end the step in other states."""
    one, two = ledgers.reference.draws, ledgers.fp8.draws
    index = next(
        (i for i, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), min(len(one), len(two))
    )
    ours, theirs = (draws[index] if index < len(draws) else None for draws in (one, two))
    where = ours or theirs
    told = [f"{_told(draw)}, draw {index + 1}" if draw else f"{index} draws" for draw in (ours, theirs)]
    cause = SIZES
    if told[0] == told[1]:
        cause = NOT_RESTORED if where and where.phase == RECOMPUTE else SEEDED
        told = [f"{told[0]}, and one state of the generator", f"{told[1]}, and another state of the generator"]
    return Difference(
        D.OTHER_RANDOM_NUMBERS,
        INVALID,
        "the arms draw other random numbers in the same step",
        about=f"random numbers of {where.owner or 'the model itself'}" if where else "random numbers",
        expected=told[0],
        seen=told[1],
        cause=cause,
        next_step="draw the same random numbers in both arms: seed before the step alone, and compare "
        "torch.get_rng_state() of both arms before this operator",
        questions=(LAYERS, LOSS),
    )


def _told(draw: Draw) -> str:
    return f"{draw.operator} of {size(draw.shape)} by {draw.owner or 'the model itself'} in the {draw.phase} pass"
