"""What each recipe promises of a product's operands: FP8 format, granularity of the scales, accumulation. Plain data.

Sources: torchao 0.18 ``Float8LinearConfig.from_recipe_name``; Transformer Engine 2.20
``transformer_engine.common.recipe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pytest_fp8.recipes import DGRAD, FPROP, POWERS, WGRAD, Role, library_of, recipe_facts

E4M3, E5M2 = "e4m3", "e5m2"
TENSOR, LINE, BLOCK, SQUARE, MX = "tensor", "line", "1x128", "128x128", "1x32"
"""One scale for a tensor; one for each line along the product's inner dimension; one for 128 values of such a line; one
for a square of 128 x 128; one for 32 values of a line."""

INPUT, WEIGHT, GRADIENT = "input", "weight", "gradient"
"""A layer's operands: each is cast once, and multiplied in two of its three products."""


@dataclass(frozen=True)
class Cast:
    """How one operand becomes FP8."""

    format: str
    scales: str = TENSOR
    powers: bool = False
    """Whether scales are powers of two."""


Casts = Mapping[Role, tuple[Cast, Cast]]
"""Role -> its two operands: fprop (input, weight), dgrad (output's gradient, weight), wgrad (output's gradient,
input). A role that is not in it stays in high precision."""


def promised_casts(backend: str, recipe: str, options: Mapping[str, Any]) -> Casts:
    """What the recipe promises for each role that it runs in FP8."""
    roles = recipe_facts(backend, recipe).roles
    made = _casts(library_of(backend), recipe, options.get("fp8_format", "HYBRID")) if roles else {}
    if options.get(POWERS):
        made = {role: (replace(one, powers=True), replace(two, powers=True)) for role, (one, two) in made.items()}
    return {role: made[role] for role in roles}


def fast_accumulation(backend: str, recipe: str) -> tuple[Role, ...]:
    """The roles in which products may accumulate in fewer bits than float32."""
    # torchao's gemm_config_output and Transformer Engine's fp8_gemm_fprop, block scaling apart, ask for it.
    roles = recipe_facts(backend, recipe).roles
    return (FPROP,) if roles and recipe not in ("block", "mxfp8") else ()


def _casts(library: str, recipe: str, te_format: str) -> dict[Role, tuple[Cast, Cast]]:
    if recipe == "tensorwise":
        return _roles(Cast(E4M3), Cast(E4M3), Cast(E5M2))
    if recipe in ("rowwise", "rowwise_with_gw_hp"):
        # Unsloth's scales are no powers of two, its weight is in FP8 already.
        line = Cast(E4M3, LINE, powers=library == "torchao")
        whole = Cast(E4M3, TENSOR, powers=True)
        return {**_roles(line, line, line), DGRAD: (line, line if recipe == "rowwise" else whole)}
    gradient = E4M3 if te_format == "E4M3" else E5M2
    if recipe == "block":
        # NVTE_FP8_BLOCK_SCALING_FP32_SCALES is off by default: scales are powers of two.
        line = Cast(E4M3, BLOCK, powers=True)
        return _roles(line, Cast(E4M3, SQUARE, powers=True), Cast(gradient, BLOCK, powers=True))
    if recipe == "mxfp8":
        line = Cast(E4M3, MX, powers=True)
        return _roles(line, line, Cast(gradient, MX, powers=True))
    return _roles(Cast(E4M3), Cast(E4M3), Cast(gradient))


def _roles(given: Cast, weight: Cast, gradient: Cast) -> dict[Role, tuple[Cast, Cast]]:
    return {FPROP: (given, weight), DGRAD: (gradient, weight), WGRAD: (gradient, given)}
