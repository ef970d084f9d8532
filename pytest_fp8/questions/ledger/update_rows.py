"""The row of the ledger about the optimizer's own rule: what it makes of one and the same gradients. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_fp8.codes import D
from pytest_fp8.floats import of_text
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.ledger.differences import INVALID, LAYERS, LOSS, Difference, Explained
from pytest_fp8.questions.ledger.evidence import TwoLedgers

OTHER = 0.01
"""Share of all updates by which the arms may differ. Sound optimizers give the same digests; one whose sums are added
in another order moves single values to the next BF16 number."""


def updates_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The weights after some steps in which both arms' optimizers got the same gradients."""
    one, two = ledgers.reference.updates, ledgers.fp8.updates
    alike = one.steps == two.steps > 0 and one.size == two.size and one.digests.keys() == two.digests.keys()
    finite = math.isfinite(ledgers.reference.loss) and math.isfinite(ledgers.fp8.loss)
    if explained.other_modules or not alike or not finite or not _same_kinds(ledgers):
        return
    other = {
        name: _squares(one.sketches[name], two.sketches[name])
        for name, digest in one.digests.items()
        if digest and two.digests[name] and digest != two.digests[name]
    }
    if not other:
        return
    every = sum(_squares(sketch, sketch)[1] for sketch in one.sketches.values())
    apart = math.sqrt(sum(apart for apart, _ in other.values()) / every) if every else math.inf
    if not apart > OTHER:
        return
    worst = max(other, key=lambda name: other[name][0] / max(other[name][1], 1e-30))
    yield Difference(
        D.OTHER_UPDATES,
        INVALID,
        "the same gradients give other updates in the FP8 arm: the optimizer's own rule differs",
        about=f"updates of {worst}",
        expected=f"the updates that BF16's optimizer makes of the same seeded gradients in {one.steps} steps",
        seen=f"other updates of {len(other)} of {len(one.digests)} weights, {apart:.1%} off: {some([worst, *other])}",
        cause="the optimizer rounds, clips or scales by itself in one arm alone: rounding of weights or gradients, a "
        "bound on updates, a rate that the step sets, a rate or state that is in no parameter group",
        next_step="make the same optimizer with the same attributes in both arms, and compare one step on equal "
        "gradients",
        questions=(LAYERS, LOSS),
    )


def _same_kinds(ledgers: TwoLedgers) -> bool:
    """Whether the weights have the same dtypes and are those that the other arm trains: other rows name these."""
    one, two = ledgers.reference, ledgers.fp8
    kinds = [{name: arm.after[name].dtype for name in arm.updates.digests if name in arm.after} for arm in (one, two)]
    return kinds[0] == kinds[1] and one.gradients == two.gradients


def _squares(one: str, two: str) -> tuple[float, float]:
    """|one - two|^2 and |one|^2."""
    import numpy as np

    ours, theirs = (np.array(of_text(text), dtype=np.float64) for text in (one, two))
    return float(((ours - theirs) ** 2).sum()), float((ours**2).sum())
