"""Where the arms' random numbers go apart: the first operator that drew others, and why it may have. Pure."""

from __future__ import annotations

from itertools import zip_longest

from pytest_fp8.codes import UNCODED
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
    pairs = enumerate(zip_longest(one, two))
    index, (ours, theirs) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (len(one), (None, None)))
    same_draw = ours is not None and theirs is not None and _told(ours) == _told(theirs)
    if same_draw and ours is not None:
        cause = NOT_RESTORED if ours.phase == RECOMPUTE else SEEDED
        seen = ("from the state that the last draw left", "from another state of the generator")
    elif ours is None and theirs is None:
        cause, seen = SEEDED, ("the same draws", "the same draws, and the generator in another state after them")
    else:
        cause, seen = SIZES, ("", "")
    where = ours or theirs
    words = [
        f"{_told(draw)}, draw {index + 1} of {len(all_of)}" if draw else f"{len(all_of)} draws, none there"
        for draw, all_of in ((ours, one), (theirs, two))
    ]
    return Difference(
        UNCODED,
        INVALID,
        "the arms draw other random numbers in the same step",
        about=f"random numbers of {where.owner or 'the model itself'}" if where else "random numbers",
        expected=f"{words[0]}: {seen[0]}".rstrip(": "),
        seen=f"{words[1]}: {seen[1]}".rstrip(": "),
        cause=cause,
        next_step="draw the same random numbers in both arms: seed before the step alone, and compare "
        "torch.get_rng_state() of both arms before this operator",
        questions=(LAYERS, LOSS),
    )


def _told(draw: Draw) -> str:
    return f"{draw.operator} of {size(draw.shape)} by {draw.owner or 'the model itself'} in the {draw.phase} pass"
