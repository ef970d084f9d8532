"""Is FP8 really running? Conversion, recipe in force and executed products, judged together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fp8.case import Case
from pytest_fp8.questions.conversion import find_in_conversion, find_in_recipe
from pytest_fp8.questions.findings import SHOWN, Finding, eval_cause, fail, some
from pytest_fp8.questions.products import FP8, Attribution, StepProducts, role_table
from pytest_fp8.questions.records import LayersEvidence
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, ROLES, WGRAD, recipe_facts
from pytest_fp8.verdicts import Decision, Verdict

QUESTION = "layers"
GAIN = (0.75, 1.33)
"""A sound FP8 layer's output is its high-precision output times 1 to within a few per cent, whatever its SQNR; a wrong
scale is wrong by a factor."""


COUNTED = {
    "fp8_layers": "Linears in FP8",
    **{f"fp8_{role}": f"{role} products in FP8 per step" for role in (*ROLES, RECOMPUTE)},
}
"""Counts that a baseline keeps, name -> unit. They are exact: a single one less fails."""


def check_layers(
    case: Case,
    evidence: LayersEvidence,
    baseline_share: Sequence[float] = (),
    baseline_counts: Mapping[str, int] | None = None,
) -> Decision:
    """FAIL names the first thing that is wrong, from what was converted to what was executed.

    ``baseline_share``: the stored share of GEMM FLOPs in FP8; it is exact, so any loss of more than rounding fails.
    ``baseline_counts``: the stored counts of :data:`COUNTED`; any that is lower now fails.
    """
    step = evidence.step(recipe_facts(case.backend, case.recipe).roles)
    numbers = summarise(evidence, step)
    found = (
        find_in_conversion(case, evidence)
        or find_in_recipe(case, evidence)
        or _execution(case, evidence, step)
        or _counts(counted(numbers), baseline_counts or {})
        or _scaling(evidence)
        or _share(numbers["fp8_share"], baseline_share)
    )
    if found is not None:
        verdict, lines = found
        return Decision(QUESTION, verdict, numbers=numbers, **lines)
    return Decision(
        QUESTION,
        Verdict.PASS,
        f"{numbers['converted']} of {numbers['linears']} Linears in FP8, "
        f"{numbers['fp8_share']:.1%} of the step's GEMM FLOPs" + _beside(evidence),
        numbers=numbers,
    )


def summarise(evidence: LayersEvidence, step: StepProducts) -> dict[str, Any]:
    """Coverage three ways (count, parameters, FLOPs), products per role, and reasons for what was left."""
    sizes = {name: inputs * outputs for name, (inputs, outputs) in evidence.originals.items()}
    reasons: dict[str, int] = {}
    for why in evidence.skipped.values():
        reasons[why] = reasons.get(why, 0) + 1
    return {
        "linears": len(evidence.originals),
        "converted": len(evidence.converted),
        "parameter_share": sum(sizes[n] for n in evidence.converted) / max(1, sum(sizes.values())),
        "fp8_share": step.fp8_share(),
        "roles": role_table(step, evidence.calls),
        "skipped": reasons,
        "stacked": list(evidence.stacked),
        "attention": {name: list(kernels) for name, kernels in evidence.attention.items()},
        "lowest_sqnr_db": min((sqnr for _, sqnr in evidence.agreement.values()), default=None),
    }


def _beside(evidence: LayersEvidence) -> str:
    """What a PASS must not hide: weights that are no Linear's, such as a mixture's experts in one parameter."""
    if not evidence.stacked:
        return ""
    return f"; not in FP8, since no Linear holds them: {some(evidence.stacked)}"


def _execution(case: Case, evidence: LayersEvidence, step: StepProducts) -> Finding | None:
    claimed = set(recipe_facts(case.backend, case.recipe).roles)
    converted = {call.name for call in evidence.calls if call.fp8}
    if not converted:
        return fail(
            "converted layers were never called in the training step",
            expected="the model's forward pass to go through its FP8 layers",
            seen="no FP8 layer was called",
            cause="the model keeps references to the unconverted modules",
            next_step="convert before anything takes references to layers, such as wrappers",
        )
    passed_by = [*evidence.bypassed, *_passed_by(evidence, step)]
    if passed_by:
        trained = "are trained and" if evidence.bypassed else "have their products elsewhere and"
        return fail(
            f"{len(passed_by)} converted layer(s) {trained} never called",
            expected="the model's forward pass to go through each FP8 layer",
            seen=f"gradients without a call: {some(evidence.bypassed)}"
            if evidence.bypassed
            else f"products in high precision of the sizes of {some(passed_by)}, without a call",
            **_used_past(passed_by),
        )
    # A forward pass that is repeated in high precision has its gradients there too: it is named before them.
    for role in (FPROP, RECOMPUTE, DGRAD, WGRAD):
        wanted = role in claimed or (role == RECOMPUTE and "fprop" in claimed)
        mine = [a for a in step.attributions if a.role == role and a.layer in converted]
        # A recomputation ends as soon as it has what the backward pass needs: its last product may be absent.
        wrong = [a for a in mine if (a.kind == FP8) != wanted and not (role == RECOMPUTE and a.kind == "absent")]
        if not wrong:
            continue
        unknown = [a for a in wrong if a.kind == "unknown kernel"]
        if unknown and len(unknown) == len(wrong):
            return Verdict.INCONCLUSIVE, {
                "headline": f"{role} ran on kernels that are of no learned family",
                "expected": f"a family seen in known FP8 products: {', '.join((evidence.families or {}).get(FP8, []))}",
                "seen": ", ".join(
                    sorted({p.kernel for p in evidence.verified() if p.kind == "unknown kernel"})[:SHOWN]
                ),
                "cause": "a library that multiplies FP8 with kernels of its own",
                "next_step": "profile the layer alone and report the kernel's name",
            }
        if not wanted:
            return fail(
                f"{role} ran in FP8 although recipe {case.recipe!r} keeps it in high precision",
                expected=f"no {role} product in FP8",
                seen=f"{len(wrong)} of {len(mine)}: {_kinds(wrong)}",
                cause="another recipe's behaviour",
                next_step="check the recipe's configuration",
            )
        doubt = (
            "" if all(a.sure for a in wrong) else " (dgrad and wgrad of equal sizes: which of the two is not certain)"
        )
        return fail(
            f"converted but not executed in FP8: {role} of {len(wrong)} of {len(mine)} layers",
            expected=f"{len(mine)} {role} products in FP8",
            seen=f"{len(mine) - len(wrong)} in FP8; {_kinds(wrong)}{doubt}",
            cause=eval_cause(evidence) or _role_cause(role),
            next_step="read the layer's backward, and the recipe's roles",
        )
    return None


def _used_past(layers: Sequence[str]) -> dict[str, str]:
    """Cause and next step of layers whose weights are used without a call. torch's attention is the one case in which
    nobody can call the layer: ``nn.MultiheadAttention`` gives ``out_proj``'s weight to its function."""
    attention = [name for name in layers if name.rpartition(".")[2] == "out_proj"]
    cause = "their weights are used past the layer: F.linear(x, layer.weight), a fused kernel, or a wrapper"
    call = "call the layer itself, so that its FP8 forward runs"
    if not attention:
        return {"cause": cause, "next_step": call}
    in_torch = (
        "nn.MultiheadAttention (and nn.TransformerEncoderLayer with it) gives the weight of its out_proj to "
        "F.multi_head_attention_forward, which multiplies in high precision"
    )
    leave = "where that is torch's: Workload(leave=('*.out_proj',)), or an attention of your own that calls its Linears"
    if len(attention) == len(layers):
        return {"cause": f"{in_torch}; or {cause}", "next_step": leave}
    return {"cause": f"{cause}; and {in_torch}", "next_step": f"{call}; for out_proj, {leave}"}


def _passed_by(evidence: LayersEvidence, step: StepProducts) -> list[str]:
    """Converted layers that were not called, while a product of their sizes ran in high precision and belongs to no
    layer. A frozen weight has no gradient that would show it. An expert that got no tokens has no such product."""
    called = {call.name for call in evidence.calls}
    strays = [(p.inner, p.outer) for p in step.others if p.phase == "forward" and p.kind != FP8]
    found = []
    for name in evidence.converted:
        inputs, outputs = evidence.originals[name]
        if name not in called and name not in evidence.bypassed:
            stray = next((s for s in strays if s[0] == inputs and outputs in s[1]), None)
            if stray is not None:
                strays.remove(stray)
                found.append(name)
    return found


def counted(numbers: Mapping[str, Any]) -> dict[str, int]:
    """The exact counts of :data:`COUNTED` in the numbers of a decision; a role that did not run is left out."""
    roles = {f"fp8_{role}": count["fp8"] for role, count in numbers["roles"].items()}
    return {"fp8_layers": numbers["converted"], **{name: n for name, n in roles.items() if name in COUNTED}}


def _counts(now: Mapping[str, int], baseline: Mapping[str, int]) -> Finding | None:
    for name, stored in baseline.items():
        if now.get(name, 0) < stored:
            return fail(
                f"fewer {COUNTED[name]} than in the baseline",
                expected=f"{stored}, exactly as stored",
                seen=f"{now.get(name, 0)}",
                cause="layers or products are left in high precision now that ran in FP8 before",
                next_step="compare the reasons for what was left, in the report",
            )
    return None


def _scaling(evidence: LayersEvidence) -> Finding | None:
    off = {name: gain for name, (gain, _) in evidence.agreement.items() if not GAIN[0] < gain < GAIN[1]}
    if off:
        name = max(off, key=lambda layer: abs(off[layer] - 1))
        return fail(
            f"{len(off)} FP8 layer(s) compute something else than the same layer in high precision",
            expected=f"output = x . W^T within a factor of {GAIN[0]} to {GAIN[1]}",
            seen=f"{name}: {off[name]:.2f} times it, SQNR {evidence.agreement[name][1]:.1f} dB"
            + (f"; also {some([n for n in off if n != name])}" if len(off) > 1 else ""),
            cause="a wrong scale: what a tensor was multiplied by before the cast is not what divides the product",
            next_step="compare the layer's scales with amax / 448 (e4m3) of its weight and input",
        )
    if evidence.frozen_history:
        return fail(
            f"the amax history of {len(evidence.frozen_history)} layers does not change in a training step",
            expected="a new entry in each layer's history after each step",
            seen=f"unchanged: {some(evidence.frozen_history)}",
            cause="the amax history is never updated: scales stay as they were, while weights and activations move",
            next_step="run forward and backward inside te.autocast, and never step around its exit",
        )
    return None


def _share(share: float, baseline: Sequence[float]) -> Finding | None:
    if baseline and share < min(baseline) - 1e-6:
        return fail(
            "less of the step runs in FP8 than in the baseline",
            expected=f"{min(baseline):.2%} of GEMM FLOPs",
            seen=f"{share:.2%}",
            cause="layers are left in high precision now that were converted before",
            next_step="compare the reasons for what was left, in the report",
        )
    return None


def _role_cause(role: str) -> str:
    return {
        "fprop": "FP8 is off in the forward pass, or the library fell back to high precision",
        "dgrad": "forward in FP8, backward in high precision: the layer was made for inference or for frozen weights",
        "wgrad": "the weight gradient was kept in high precision by the recipe or the layer",
        RECOMPUTE: "recomputation under activation checkpointing runs outside the precision context",
    }[role]


def _kinds(wrong: Sequence[Attribution]) -> str:
    by_kind: dict[str, list[str]] = {}
    for attribution in wrong:
        by_kind.setdefault(attribution.kind, []).append(attribution.layer)
    return "; ".join(f"{kind}: {some(layers)}" for kind, layers in by_kind.items())
