"""Judges the formats of operands as they were multiplied, and how products accumulated. Pure."""

from __future__ import annotations

from pytest_fp8.case import Case
from pytest_fp8.casts import fast_accumulation, promised_casts
from pytest_fp8.codes import N
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import EVALUATION, FP8, Product
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD, Role
from pytest_fp8.verdicts import Finding

ROLES_OF = {"forward": (FPROP,), RECOMPUTE: (FPROP,), "backward": (DGRAD, WGRAD)}
"""Phase -> the roles whose products it holds. Both of the backward pass have the same formats in every recipe."""


def find_in_formats(case: Case, layers: LayersEvidence) -> Finding | None:
    """FAIL where an operand has another FP8 format than the recipe promises, or a product another accumulation. Not
    judged where no layer of the library is: the recipe of FP8 of the user's own cannot be read."""
    if not layers.live_fp8:
        return None
    usual = promised_casts(case.backend, case.recipe, case.full_options)
    # Of layers by another recipe of the library: products of their sizes may have its formats.
    others = layers.other_recipes(case)
    of_size = {
        call.expected(role): promised_casts(case.backend, others[call.name], {})
        for call in layers.calls
        for role in (call.owed if call.name in others else ())
    }
    fast = fast_accumulation(case.backend, case.recipe)
    # Where no hook runs, as in compiled code, recomputed products lie in the backward phase.
    recomputed = {call.expected(RECOMPUTE) for call in layers.calls if RECOMPUTE in call.owed}
    ran = [p for p in layers.verified() if p.kind == FP8 and p.phase not in (EVALUATION, "optimizer")]

    def roles(product: Product) -> tuple[Role, ...]:
        again = product.phase == "backward" and product.extents in recomputed
        return (*ROLES_OF[product.phase], *((FPROP,) if again else ()))

    for phase in ROLES_OF:
        mine = [p for p in ran if p.phase == phase]
        promised = {
            p: {
                tuple(sorted(cast.format for cast in casts[role]))
                for casts in (usual, of_size.get(p.extents, {}))
                for role in roles(p)
                if role in casts
            }
            for p in mine
        }
        wrong = [p for p in mine if p.formats and promised[p] and tuple(sorted(p.formats)) not in promised[p]]
        if wrong:
            seen = " x ".join(sorted(wrong[0].formats))
            wanted = " or ".join(" x ".join(pair) for pair in sorted(promised[wrong[0]]))
            said = f"{seen} in {len(wrong)} of {len(mine)} products, of the size of {_names(wrong, layers)}"
            return finding(N.OTHER_FORMAT, wanted, said, count=len(wrong), phase=phase)
        wrong = [p for p in mine if p.fast_accumulation and not set(fast) & set(roles(p))]
        if wrong:
            expected = "sums in float32: this recipe asks for fast accumulation in the forward pass at most"
            said = f"{len(wrong)} of {len(mine)} products, of the size of {_names(wrong, layers)}"
            return finding(N.FAST_ACCUMULATION, expected, said, count=len(wrong), phase=phase)
    return None


def _names(products: list[Product], layers: LayersEvidence) -> str:
    sizes = [{p.inner, *p.outer} for p in products]
    return some([n for n, pair in layers.originals.items() if any(set(pair) <= size for size in sizes)]) or "no layer"
