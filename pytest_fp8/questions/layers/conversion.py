"""Was the model converted as it was meant to be, and is the recipe in force the one asked for? Pure."""

from __future__ import annotations

from pytest_fp8.case import Case
from pytest_fp8.codes import Code, L
from pytest_fp8.questions.findings import finding, some, words
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.precision import Switches, decided_by
from pytest_fp8.recipes import POWERS, Stays, library_of
from pytest_fp8.verdicts import Finding

OTHER_LIBRARIES = {"torchao": "torchao.", "transformer_engine": "transformer_engine."}
"""Backend -> how the module path of its layers begins."""


def find_in_conversion(case: Case, evidence: LayersEvidence) -> Finding | None:
    """The first thing that is wrong with which layers are in FP8, or ``None``."""
    converted, skipped, live = set(evidence.converted), evidence.skipped, set(evidence.live_fp8)
    own = OTHER_LIBRARIES.get(library_of(case.backend))
    for library, path in OTHER_LIBRARIES.items():
        names = [name for name, kind in evidence.kinds.items() if path != own and kind.startswith(path)]
        if names and not live:
            seen = f"{evidence.kinds[names[0]]}: {some(names)}"
            return finding(L.OTHER_LIBRARY, f"layers of {case.backend}", seen, library=library)
    multiply = any(each.product.kind == FP8 and each.product.phase == "forward" for each in evidence.foreign)
    if not evidence.in_fp8 and not multiply:
        return _nothing_converted(evidence)
    if missing := converted - evidence.in_fp8:
        odd = [f"{name} ({reason})" for name, reason in skipped.items() if reason.kind is Stays.SIZE]
        seen = f"not FP8: {some(missing)}" + (f"; left for their sizes: {some(odd)}" if odd else "")
        return finding(L.NOT_CONVERTED, f"{len(converted)} FP8 layers", seen)
    left = {name for name, reason in skipped.items() if reason.kind is Stays.LEFT}
    if wrong := (live & skipped.keys()) | (evidence.of_own & left):
        name = min(wrong)
        expected = f"{name} left alone ({skipped[name]})"
        return finding(L.LEFT_AND_CONVERTED, expected, f"FP8: {some(wrong)}", about=name)
    if lost := evidence.dropped_behaviour:
        seen = some([f"{name}: {what}" for name, what in lost.items()])
        return finding(L.LOST_BEHAVIOUR, "an FP8 layer that does all that the Linear did", seen, count=len(lost))
    if unaccounted := set(evidence.originals) - converted - skipped.keys() - evidence.of_own:
        return finding(
            L.UNACCOUNTED, "a reason for each layer that stays in high precision", f"no reason: {some(unaccounted)}"
        )
    return None


def _nothing_converted(evidence: LayersEvidence) -> Finding:
    """Why, as far as the reasons of the Linears, the environment and Accelerate's own state tell."""
    expected = f"FP8 layers among the model's {len(evidence.originals)} Linears"
    elsewhere = [product.phase for product in evidence.verified() if product.kind == FP8]
    if elsewhere:
        seen = "; ".join(f"{phase}: {elsewhere.count(phase)} FP8 products" for phase in dict.fromkeys(elsewhere))
        return finding(L.NO_FORWARD_IN_FP8, expected, seen)
    reasons = "; ".join(sorted(set(map(str, evidence.skipped.values())))) or "no Linear at all"
    could = [name for name in evidence.originals if name not in evidence.skipped]
    seen = f"{len(could)} Linears could be FP8 and are not: {some(could)}" if could else reasons
    switches = Switches(evidence.switches.get("asked", ""), used=evidence.switches.get("accelerate", ""))
    code: Code = L.NOTHING_CONVERTED
    if switches.environment == FP8 != switches.used:
        code = decided_by(switches)
    elif not (evidence.converted or could or any(r.kind is Stays.SIZE for r in evidence.skipped.values())):
        code = L.NO_LINEAR_FITS
    return finding(code, expected, seen, used=switches.used)


def find_in_recipe(case: Case, evidence: LayersEvidence) -> Finding | None:
    """The first layer in which another recipe was in force than the case's, or ``None``."""
    asked = {"recipe": case.recipe, **case.full_options}
    others = evidence.other_recipes(case)
    for name, seen in evidence.recipes.items():
        wrong = [key for key in {**asked, POWERS: 0} if seen.get(key) != asked.get(key)]
        if wrong and seen.get("recipe") == "off":
            return finding(L.FP8_OFF, words(asked), f"off, in {name}", cause=eval_cause(evidence))
        if wrong and name not in others:
            wanted, had = ({key: values.get(key) for key in wrong} for values in (asked, seen))
            return finding(L.OTHER_RECIPE, words(wanted), f"{words(had)}, in {name}")
    return None


def eval_cause(evidence: LayersEvidence) -> str:
    """The cause, where layers in eval mode may explain why FP8 did not run; else an empty string."""
    off = len(evidence.in_eval)
    return f"eval() switched FP8 off: {off} layers are in eval mode while the model trains" if off else ""
