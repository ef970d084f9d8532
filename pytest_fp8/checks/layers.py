"""Is FP8 really running? Conversion, recipe in force and executed products, judged together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fp8.cases import Case
from pytest_fp8.checks.precision import Switches, who_won
from pytest_fp8.evidence.products import FP8, Attribution, StepProducts
from pytest_fp8.evidence.records import LayersEvidence
from pytest_fp8.gate.verdicts import Decision, Verdict
from pytest_fp8.recipes import LIBRARIES, RECOMPUTE, ROLES, recipe_facts

QUESTION = "layers"
SHOWN = 4
"""Names quoted in a message before it says how many more there are."""
GAIN = (0.75, 1.33)
"""A sound FP8 layer's output is its high-precision output times 1 to within a few per cent, whatever its SQNR; a wrong
scale is wrong by a factor."""
OTHER_LIBRARIES = {"torchao": "torchao.", "transformer_engine": "transformer_engine."}
"""Backend -> how the module path of its layers begins."""


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
    step = evidence.step()
    numbers = summarise(evidence, step)
    found = (
        _conversion(case, evidence)
        or _recipe(case, evidence)
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
    for why in evidence.left.values():
        reasons[why] = reasons.get(why, 0) + 1
    return {
        "linears": len(evidence.originals),
        "converted": len(evidence.converted),
        "parameter_share": sum(sizes[n] for n in evidence.converted) / max(1, sum(sizes.values())),
        "fp8_share": step.fp8_share(),
        "roles": evidence.roles(),
        "left": reasons,
        "stacked": list(evidence.stacked),
        "attention": {name: list(kernels) for name, kernels in evidence.attention.items()},
        "lowest_sqnr_db": min((sqnr for _, sqnr in evidence.agreement.values()), default=None),
    }


def _beside(evidence: LayersEvidence) -> str:
    """What a PASS must not hide: weights that are no Linear's, such as a mixture's experts in one parameter."""
    if not evidence.stacked:
        return ""
    return f"; not in FP8, since no Linear holds them: {_some(evidence.stacked)}"


_Finding = tuple[Verdict, dict[str, str]]


def _fail(headline: str, **lines: str) -> _Finding:
    return Verdict.FAIL, {"headline": headline, **lines}


def _conversion(case: Case, evidence: LayersEvidence) -> _Finding | None:
    names, converted, left = set(evidence.originals), set(evidence.converted), set(evidence.left)
    live = set(evidence.live_fp8)
    if not live:
        return _nothing_converted(case, evidence)
    if converted - live:
        return _fail(
            "layers that should have been converted are not FP8 layers",
            expected=f"{len(converted)} FP8 layers",
            seen=f"not FP8: {_some(converted - live)}",
            cause=_why_not_live(evidence, converted - live),
            next_step="convert last, after adapters and before compiling",
        )
    if live & left:
        name = sorted(live & left)[0]
        return _fail(
            "a layer that was to stay in high precision is an FP8 layer",
            expected=f"{name} left alone ({evidence.left[name]})",
            seen=f"FP8: {_some(live & left)}",
            cause="the filter did not reach the converter: what it names "
            + ("was an adapter" if evidence.left[name].startswith("adapter") else "was converted with the rest"),
            next_step="pass the filter as module_filter_fn",
        )
    unaccounted = names - converted - left
    if unaccounted:
        return _fail(
            "Linears that were neither converted nor left with a reason",
            expected="a reason for each layer that stays in high precision",
            seen=_some(unaccounted),
            cause="a converter that stopped at the first layer it could not take, or a filter that nobody wrote down",
            next_step="convert it, or give it a reason to stay: Workload(leave=(name or pattern, ...))",
        )
    return None


def _why_not_live(evidence: LayersEvidence, lost: set[str]) -> str:
    """Whether what was not converted comes after a layer of odd sizes under the same parent, where a loop returned."""
    order = list(evidence.originals)
    for name in sorted(lost, key=order.index):
        earlier = [n for n in order[: order.index(name)] if n.rpartition(".")[0] == name.rpartition(".")[0]]
        odd = [n for n in earlier if evidence.left.get(n, "").startswith("size")]
        if odd:
            return (
                f"a converter that stopped early, at {odd[0]} ({evidence.left[odd[0]]}): Accelerate's convert_model "
                "returns there, and the layers after it stay as they were"
            )
    return "a converter that stopped early, or a module replaced after the conversion"


def _nothing_converted(case: Case, evidence: LayersEvidence) -> _Finding:
    own = OTHER_LIBRARIES.get(LIBRARIES.get(case.backend, case.backend))
    for library, path in OTHER_LIBRARIES.items():
        foreign = [name for name, kind in evidence.kinds.items() if path != own and kind.startswith(path)]
        if foreign:
            return _fail(
                f"the FP8 layers are another library's: {library}",
                expected=f"layers of {case.backend}",
                seen=f"{evidence.kinds[foreign[0]]}: {_some(foreign)}",
                cause="both libraries are installed and nobody said which to use: Accelerate then takes torchao",
                next_step="pass the library's own recipe object, e.g. kwargs_handlers=[TERecipeKwargs(...)]",
            )
    return _fail(
        "no layer was converted to FP8",
        expected=f"FP8 layers among the model's {len(evidence.originals)} Linears",
        seen="; ".join(sorted(set(evidence.left.values())) if not evidence.converted else ["no FP8 layer"])
        or "no Linear at all",
        cause=_who_dropped_it(evidence),
        next_step="convert the model itself, or check how FP8 is switched on"
        if evidence.converted
        else "make in_features and out_features multiples of 16, or check how FP8 is switched on",
    )


def _who_dropped_it(evidence: LayersEvidence) -> str:
    switches = Switches(evidence.switches.get("asked", ""), used=evidence.switches.get("accelerate", ""))
    if switches.used == FP8:
        return "Accelerate says that it trains in fp8: prepare() was not given this model, or filtered all its layers"
    if switches.environment == FP8:
        return who_won(switches)
    return "FP8 was asked for where nothing reads it, or every layer was filtered out or has odd sizes"


def _recipe(case: Case, evidence: LayersEvidence) -> _Finding | None:
    asked = {"recipe": case.recipe, **case.full_options}
    for name, seen in evidence.recipes.items():
        wrong = {key: (value, seen.get(key)) for key, value in asked.items() if seen.get(key) != value}
        if not wrong:
            continue
        if seen.get("recipe") == "off":
            return _fail(
                "FP8 was off inside the forward pass",
                expected=_words(asked),
                seen=f"off, in {name}",
                cause=_eval_cause(evidence) or "the forward pass ran outside the backend's precision context",
                next_step="wrap the forward pass, not the training loop's other parts",
            )
        return _fail(
            "another recipe was in force than the one asked for",
            expected=_words({key: pair[0] for key, pair in wrong.items()}),
            seen=f"{_words({key: pair[1] for key, pair in wrong.items()})}, in {name}",
            cause="an option that was dropped on its way to the library" + _by_accelerate(case, wrong),
            next_step="pass the library's own recipe object",
        )
    return None


def _by_accelerate(case: Case, wrong: Mapping[str, Any]) -> str:
    """Accelerate hands on what differs from its own defaults, which are not Transformer Engine's."""
    road = case.backend.startswith(("accelerate_", "trainer_"))
    defaults = recipe_facts(case.backend, case.recipe).options
    if not road or any(defaults.get(key) != asked for key, (asked, _) in wrong.items()):
        return ""
    return ": Accelerate's to_kwargs() leaves out what equals its own default, and the library's default is another"


def _execution(case: Case, evidence: LayersEvidence, step: StepProducts) -> _Finding | None:
    claimed = set(recipe_facts(case.backend, case.recipe).roles)
    converted = {call.name for call in evidence.calls if call.fp8}
    if not converted:
        return _fail(
            "converted layers were never called in the training step",
            expected="the model's forward pass to go through its FP8 layers",
            seen="no FP8 layer was called",
            cause="the model keeps references to the unconverted modules",
            next_step="convert before anything takes references to layers, such as wrappers",
        )
    if evidence.bypassed:
        return _fail(
            f"{len(evidence.bypassed)} converted layer(s) are trained and never called",
            expected="the model's forward pass to go through each FP8 layer",
            seen=f"gradients without a call: {_some(evidence.bypassed)}",
            cause="their weights are used past the layer: F.linear(x, layer.weight), a fused kernel, or a wrapper",
            next_step="call the layer itself, so that its FP8 forward runs",
        )
    for role in (*ROLES, RECOMPUTE):
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
            return _fail(
                f"{role} ran in FP8 although recipe {case.recipe!r} keeps it in high precision",
                expected=f"no {role} product in FP8",
                seen=f"{len(wrong)} of {len(mine)}: {_kinds(wrong)}",
                cause="another recipe's behaviour",
                next_step="check the recipe's configuration",
            )
        doubt = (
            "" if all(a.sure for a in wrong) else " (dgrad and wgrad of equal sizes: which of the two is not certain)"
        )
        return _fail(
            f"converted but not executed in FP8: {role} of {len(wrong)} of {len(mine)} layers",
            expected=f"{len(mine)} {role} products in FP8",
            seen=f"{len(mine) - len(wrong)} in FP8; {_kinds(wrong)}{doubt}",
            cause=_eval_cause(evidence) or _role_cause(role),
            next_step="read the layer's backward, and the recipe's roles",
        )
    return None


def counted(numbers: Mapping[str, Any]) -> dict[str, int]:
    """The exact counts of :data:`COUNTED` in the numbers of a decision; a role that did not run is left out."""
    roles = {f"fp8_{role}": count["fp8"] for role, count in numbers["roles"].items()}
    return {"fp8_layers": numbers["converted"], **{name: n for name, n in roles.items() if name in COUNTED}}


def _counts(now: Mapping[str, int], baseline: Mapping[str, int]) -> _Finding | None:
    for name, stored in baseline.items():
        if now.get(name, 0) < stored:
            return _fail(
                f"fewer {COUNTED[name]} than in the baseline",
                expected=f"{stored}, exactly as stored",
                seen=f"{now.get(name, 0)}",
                cause="layers or products are left in high precision now that ran in FP8 before",
                next_step="compare the reasons for what was left, in the report",
            )
    return None


def _scaling(evidence: LayersEvidence) -> _Finding | None:
    off = {name: gain for name, (gain, _) in evidence.agreement.items() if not GAIN[0] < gain < GAIN[1]}
    if off:
        name = max(off, key=lambda layer: abs(off[layer] - 1))
        return _fail(
            f"{len(off)} FP8 layer(s) compute something else than the same layer in high precision",
            expected=f"output = x . W^T within a factor of {GAIN[0]} to {GAIN[1]}",
            seen=f"{name}: {off[name]:.2f} times it, SQNR {evidence.agreement[name][1]:.1f} dB"
            + (f"; also {_some([n for n in off if n != name])}" if len(off) > 1 else ""),
            cause="a wrong scale: what a tensor was multiplied by before the cast is not what divides the product",
            next_step="compare the layer's scales with amax / 448 (e4m3) of its weight and input",
        )
    if evidence.frozen_history:
        return _fail(
            f"the amax history of {len(evidence.frozen_history)} layers does not change in a training step",
            expected="a new entry in each layer's history after each step",
            seen=f"unchanged: {_some(evidence.frozen_history)}",
            cause="the amax history is never updated: scales stay as they were, while weights and activations move",
            next_step="run forward and backward inside te.autocast, and never step around its exit",
        )
    return None


def _eval_cause(evidence: LayersEvidence) -> str:
    if not evidence.in_eval:
        return ""
    return f"eval() switched FP8 off: {len(evidence.in_eval)} layers are in eval mode while the model trains"


def _share(share: float, baseline: Sequence[float]) -> _Finding | None:
    if baseline and share < min(baseline) - 1e-6:
        return _fail(
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
    return "; ".join(f"{kind}: {_some(layers)}" for kind, layers in by_kind.items())


def _some(names: Any) -> str:
    ordered = list(dict.fromkeys(names)) if isinstance(names, list) else sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
