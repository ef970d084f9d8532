"""FP8 by code of the user's own, as over ``torch._scaled_mm``: known by its products, not by a class. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pytest_fp8.codes import L
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8, Product, StepProducts
from pytest_fp8.questions.ledger.evidence import OwnedProduct
from pytest_fp8.recipes import DGRAD, FPROP, WGRAD, Role
from pytest_fp8.verdicts import Finding


@dataclass(frozen=True)
class OwnFp8:
    """What runs in FP8 and is no FP8 layer that the backend knows."""

    layers: frozenset[str]
    """Linears whose forward products run in FP8."""
    products: Sequence[OwnedProduct]
    """Products in FP8 that no Linear called."""


def own_fp8(evidence: LayersEvidence, step: StepProducts) -> OwnFp8:
    products = [owned for owned in evidence.foreign if owned.product.kind == FP8]
    forward = [a for a in step.attributions if a.role == FPROP]
    called = {a.layer for a in forward}
    layers = {a.layer for a in forward if a.kind == FP8}
    # A function may be given the weight of a Linear that is then not called: q(x) becomes fp8_linear(x, q.weight).
    left = [owned.product for owned in products if owned.product.phase == "forward"]
    for name, (inputs, outputs) in evidence.originals.items():
        given = next((p for p in left if p.inner == inputs and outputs in p.outer), None)
        if name not in called and given is not None:
            left.remove(given)
            layers.add(name)
    return OwnFp8(frozenset(layers & evidence.originals.keys() - set(evidence.live_fp8)), products)


def as_fp8_layers(evidence: LayersEvidence, names: Collection[str]) -> LayersEvidence:
    """The evidence with these layers' calls as those of FP8 layers, which owe their products in every role."""
    return replace(evidence, calls=[replace(call, fp8=call.fp8 or call.name in names) for call in evidence.calls])


def find_in_gradients(evidence: LayersEvidence, roles: Collection[Role]) -> Finding | None:
    """FP8 products outside all Linears whose gradients ran in high precision. A product and its two gradient products
    multiply the same three sizes."""
    counts: Counter[tuple[tuple[int, ...], str, bool]] = Counter()
    for owned in evidence.foreign:
        product = owned.product
        counts[_sizes(product), product.phase, product.kind == FP8] += product.batch
    kept = 2 - len({DGRAD, WGRAD} & set(roles))
    for owned in evidence.foreign:
        sizes = _sizes(owned.product)
        forward, gradients = counts[sizes, "forward", True], counts[sizes, "backward", False]
        if forward and gradients > kept * forward + 2 * counts[sizes, "forward", False]:
            in_fp8 = counts[sizes, "backward", True]
            return fail(
                L.GRADIENTS_NOT_IN_FP8,
                "products of your own run in FP8, and their gradients' products do not",
                expected=f"{(2 - kept) * forward} gradient products in FP8, of {forward} products",
                seen=f"{in_fp8} in FP8 and {gradients} in high precision, of sizes {'x'.join(map(str, sizes))}, "
                f"by {owned.owner or 'the model itself'}",
                cause="forward in FP8, backward in high precision: the function's backward multiplies what it saved "
                "in high precision, or autograd derives it from a cast",
                next_step="multiply in FP8 in the function's backward, too; or ask for a recipe that keeps these "
                "gradients in high precision, such as rowwise_with_gw_hp",
                about=owned.owner,
            )
    return None


def said_of_own(own: OwnFp8, step: StepProducts) -> list[str]:
    """What a PASS says of FP8 that is no layer of the backend's, and what was not judged there."""
    said = []
    if own.layers:
        said.append(f"FP8 by code of your own, known by its products: {some(own.layers)} (its recipe was not read)")
    if own.products:
        share = sum(owned.product.flops for owned in own.products) / step.flops()
        said.append(
            f"{len(own.products)} products in FP8 ({share:.1%} of the GEMM FLOPs) that no Linear calls: "
            f"{callers(own.products)} (not judged by layer and role; what else runs there was not compared)"
        )
    return said


def callers(products: Sequence[OwnedProduct]) -> str:
    """``bmm of blocks.0.mix``: the operators that multiply, and the modules that call them."""
    by_flops: Counter[str] = Counter()
    for owned in products:
        by_flops[f"{owned.product.operator} of {owned.owner or 'the model itself'}"] += owned.product.flops
    return some([name for name, _ in by_flops.most_common()])


def _sizes(product: Product) -> tuple[int, ...]:
    return tuple(sorted((product.inner, *product.outer)))
