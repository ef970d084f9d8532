"""Does FP8 run to the end of a curve? The products of its last step against those of the arm's first one. Pure."""

from __future__ import annotations

from pytest_fp8.questions.findings import Finding, fail
from pytest_fp8.questions.loss.evidence import LossEvidence, ProductCount

NONE = ProductCount(fp8=0, other=0)


def fp8_lost_on_the_way(evidence: LossEvidence) -> Finding | None:
    """Products that ran in FP8 in the first step and in another precision, or not at all, in a curve's last one.

    An expert that rests takes its products with it, so that fewer in FP8 alone are no finding: others must be more, or
    no product of that part of the step may be left in FP8.
    """
    seeds = sorted(evidence.fp8)
    first = evidence.fp8[seeds[0]].first_products
    for seed in seeds:
        curve = evidence.fp8[seed]
        if not curve.last_products:
            continue
        for phase, before in first.items():
            after = curve.last_products.get(phase, NONE)
            if not before.fp8 or (after.fp8 and not (after.fp8 < before.fp8 and after.other > before.other)):
                continue
            return fail(
                f"FP8 ran in step 1 and not in step {len(curve.losses)}"
                if not after.fp8
                else f"less ran in FP8 in step {len(curve.losses)} than in step 1",
                expected=f"{before.fp8} products in FP8 and {before.other} others in the {phase} pass, as in step 1",
                seen=f"{after.fp8} in FP8 and {after.other} others in step {len(curve.losses)}, seed {seed}",
                cause="something switched FP8 off while the arm trained: a schedule, a callback, a mode that changed "
                "(eval, no_grad), or a fallback after a value that was not finite",
                next_step="print the step at which FP8 is switched off; a plan that ends in BF16 on purpose has to be "
                "tested with fewer steps, @pytest.mark.fp8(loss_steps=...)",
            )
    return None
