"""Judges the formats of operands as they were multiplied, and how products accumulated. Pure."""

from __future__ import annotations

from pytest_fp8.case import Case
from pytest_fp8.casts import Casts, fast_accumulation, promised_casts
from pytest_fp8.codes import UNCODED
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import EVALUATION, FP8, Product
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD, Role
from pytest_fp8.verdicts import Finding

ROLES_OF = {"forward": (FPROP,), RECOMPUTE: (FPROP,), "backward": (DGRAD, WGRAD)}
"""Phase -> the roles whose products it holds. Both of the backward pass have the same formats in every recipe. Where
recomputation has no phase of its own, its products lie in the backward phase, too."""


def find_in_formats(case: Case, layers: LayersEvidence) -> Finding | None:
    """FAIL where an operand has another FP8 format than the recipe promises, or a product another accumulation."""
    casts = promised_casts(case.backend, case.recipe, case.full_options)
    fast = fast_accumulation(case.backend, case.recipe)
    products = [p for p in layers.verified() if p.kind == FP8 and p.phase not in (EVALUATION, "optimizer")]
    for phase, roles in ROLES_OF.items():
        mine = [p for p in products if p.phase == phase]
        allowed = roles if phase != "backward" or not layers.recompute else (*roles, FPROP)
        found = _formats(phase, mine, casts, allowed, layers) or _accumulation(phase, mine, fast, allowed, layers)
        if found is not None:
            return found
    return None


def _formats(
    phase: str, products: list[Product], casts: Casts, roles: tuple[Role, ...], layers: LayersEvidence
) -> Finding | None:
    promised = {tuple(sorted(cast.format for cast in casts[role])) for role in roles if role in casts}
    wrong = [p for p in products if p.formats and tuple(sorted(p.formats)) not in promised]
    if not wrong or not promised:
        return None
    seen = " x ".join(sorted(wrong[0].formats))
    wanted = " or ".join(" x ".join(pair) for pair in sorted(promised))
    return fail(
        UNCODED,
        f"{len(wrong)} FP8 products of the {phase} pass have operands in another format than the recipe's",
        expected=wanted,
        seen=f"{seen} in {len(wrong)} of {len(products)} products, of the size of {_names(wrong, layers)}",
        cause=f"{seen} where {wanted} was promised: E5M2 has two bits of mantissa and a wide range, for gradients; "
        "E4M3 has three",
        next_step="compare the format that the layer casts to (torchao: layer.config.cast_config_*.target_dtype; "
        "Transformer Engine: recipe.fp8_format) with the recipe's",
    )


def _accumulation(
    phase: str, products: list[Product], fast: tuple[Role, ...], roles: tuple[Role, ...], layers: LayersEvidence
) -> Finding | None:
    wrong = [p for p in products if p.fast_accumulation]
    if not wrong or set(fast) & set(roles):
        return None
    return fail(
        UNCODED,
        f"{len(wrong)} FP8 products of the {phase} pass use fast accumulation",
        expected="sums in float32: this recipe asks for fast accumulation in the forward pass at most",
        seen=f"{len(wrong)} of {len(products)} products, of the size of {_names(wrong, layers)}",
        cause="fast accumulation where it was not promised: sums keep about 14 bits, which costs gradients accuracy",
        next_step="set use_fast_accum=False in torchao's gemm_config_*, or use_split_accumulator=True in Transformer "
        "Engine's fp8_gemm_*",
    )


def _names(products: list[Product], layers: LayersEvidence) -> str:
    sizes = [{p.inner, *p.outer} for p in products]
    return some([n for n, pair in layers.originals.items() if any(set(pair) <= size for size in sizes)]) or "no layer"
