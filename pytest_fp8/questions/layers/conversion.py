"""Was the model converted as it was meant to be, and is the recipe in force the one asked for? Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fp8.case import Case
from pytest_fp8.codes import Code, L
from pytest_fp8.questions.findings import fail, some, words
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.precision import Switches, decided_by, who_won
from pytest_fp8.recipes import POWERS, Stays, backend_type, library_of, recipe_facts
from pytest_fp8.verdicts import Finding

OTHER_LIBRARIES = {"torchao": "torchao.", "transformer_engine": "transformer_engine."}
"""Backend -> how the module path of its layers begins."""


def find_in_conversion(case: Case, evidence: LayersEvidence) -> Finding | None:
    """The first thing that is wrong with which layers are in FP8, or ``None``."""
    converted, skipped, live = set(evidence.converted), set(evidence.skipped), set(evidence.live_fp8)
    if not live and (other := _of_other_library(case, evidence)):
        return other
    multiply = any(each.product.kind == FP8 and each.product.phase == "forward" for each in evidence.foreign)
    if not evidence.in_fp8 and not multiply:
        return _nothing_converted(case, evidence)
    missing = converted - evidence.in_fp8
    if missing:
        return fail(
            L.NOT_CONVERTED,
            "layers that should have been converted are not FP8 layers",
            expected=f"{len(converted)} FP8 layers",
            seen=f"not FP8: {some(missing)}",
            cause=_why_not_live(evidence, missing),
            next_step="convert last, after adapters and before compiling",
        )
    left = {name for name, reason in evidence.skipped.items() if reason.kind is Stays.LEFT}
    wrong = (live & skipped) | (evidence.of_own & left)
    if wrong:
        name = min(wrong)
        adapter = evidence.skipped[name].kind is Stays.ADAPTER
        then = "replace the layers yourself: Workload(convert=...)"
        then = f"convert before adapters are added, or {then}" if adapter else then
        # torchao takes a filter; Accelerate's conversion to Transformer Engine takes none.
        of_torchao = library_of(case.backend) == "torchao"
        return fail(
            L.LEFT_AND_CONVERTED,
            "a layer that was to stay in high precision is an FP8 layer",
            expected=f"{name} left alone ({evidence.skipped[name]})",
            seen=f"FP8: {some(wrong)}",
            cause="the filter did not reach the converter: what it names "
            + ("was an adapter" if adapter else "was converted with the rest"),
            next_step="pass the filter as module_filter_fn" if of_torchao else then,
            about=name,
        )
    if evidence.dropped_behaviour:
        return fail(
            L.LOST_BEHAVIOUR,
            f"{len(evidence.dropped_behaviour)} converted layer(s) lost what they did besides their product",
            expected="an FP8 layer that does all that the Linear did",
            seen=some([f"{name}: {what}" for name, what in evidence.dropped_behaviour.items()]),
            cause="the conversion puts a layer of the library's own in the Linear's place, which takes over its "
            "weights and nothing else",
            next_step="leave it in high precision, Workload(leave=(its name,)), or do that outside the Linear: in the "
            "module that calls it, or in a hook that is registered after the conversion",
        )
    unaccounted = set(evidence.originals) - converted - skipped - evidence.of_own
    if unaccounted:
        return fail(
            L.UNACCOUNTED,
            "Linears that were neither converted nor left with a reason",
            expected="a reason for each layer that stays in high precision",
            seen=some(unaccounted),
            cause="a converter that stopped at the first layer it could not take, or a filter that names no reason",
            next_step="convert it, or give it a reason to stay: Workload(leave=(name or pattern, ...))",
        )
    return None


def eval_cause(evidence: LayersEvidence) -> str:
    """The cause, where layers in eval mode may explain why FP8 did not run; else an empty string."""
    if not evidence.in_eval:
        return ""
    return f"eval() switched FP8 off: {len(evidence.in_eval)} layers are in eval mode while the model trains"


def _why_not_live(evidence: LayersEvidence, missing: set[str]) -> str:
    """Why layers were not converted. Accelerate's loop over a module's children returns at the first Linear whose sizes
    FP8 does not take: then what was not converted comes after such a Linear in the same parent."""
    order = list(evidence.originals)
    odd = {name for name, reason in evidence.skipped.items() if reason.kind is Stays.SIZE}
    for name in sorted(missing, key=order.index):
        earlier = [n for n in order[: order.index(name)] if n.rpartition(".")[0] == name.rpartition(".")[0]]
        if first := next((n for n in earlier if n in odd), ""):
            return (
                f"a converter that stopped early, at {first} ({evidence.skipped[first]}): Accelerate's convert_model "
                "returns there, and the layers after it stay as they were"
            )
    return "a converter that stopped early, or a module replaced after the conversion"


def _of_other_library(case: Case, evidence: LayersEvidence) -> Finding | None:
    own = OTHER_LIBRARIES.get(library_of(case.backend))
    for library, path in OTHER_LIBRARIES.items():
        names = [name for name, kind in evidence.kinds.items() if path != own and kind.startswith(path)]
        if names:
            return fail(
                L.OTHER_LIBRARY,
                f"the FP8 layers are another library's: {library}",
                expected=f"layers of {case.backend}",
                seen=f"{evidence.kinds[names[0]]}: {some(names)}",
                cause="both libraries are installed and nobody said which to use: Accelerate then takes torchao",
                next_step="pass the library's own recipe object, e.g. kwargs_handlers=[TERecipeKwargs(...)]",
            )
    return None


def _nothing_converted(case: Case, evidence: LayersEvidence) -> Finding:
    expected = f"FP8 layers among the model's {len(evidence.originals)} Linears"
    elsewhere = [product.phase for product in evidence.verified() if product.kind == FP8]
    if elsewhere:
        return fail(
            L.NO_FORWARD_IN_FP8,
            "FP8 products run, and none in the forward pass that trains",
            expected=expected,
            seen="; ".join(f"{phase}: {elsewhere.count(phase)} FP8 products" for phase in dict.fromkeys(elsewhere)),
            cause="a layer or function of one's own that multiplies in high precision where it trains, as with a "
            "branch on self.training or on torch.is_grad_enabled()",
            next_step="read the layer's forward, and what it asks before it multiplies in FP8",
        )
    code, cause, next_step = _why_nothing(evidence)
    seen = "; ".join(sorted(set(map(str, evidence.skipped.values())))) or "no Linear at all"
    if could := _could_be(evidence):
        linears = "1 Linear could be FP8 and is" if len(could) == 1 else f"{len(could)} Linears could be FP8 and are"
        seen = f"{linears} not: {some(could)}"
    headline = "no layer was converted to FP8, and no product ran in FP8"
    return fail(code, headline, expected=expected, seen=seen, cause=cause, next_step=next_step)


def _could_be(evidence: LayersEvidence) -> list[str]:
    """The Linears that nothing keeps in high precision, in the model's order."""
    return [name for name in evidence.originals if name not in evidence.skipped]


_HOW_TO_CONVERT = {
    Stays.SIZE: "make in_features and out_features multiples of 16",
    Stays.LEFT: "take names or patterns out of Workload(leave=...)",
    Stays.EDGE: "give the model more Linears than a first and a last, or take the backend torchao, which converts both",
    Stays.HEAD: "write the other products as nn.Linear",
    Stays.ADAPTER: "give the Linears under the adapters sizes that FP8 takes",
}
"""Why a Linear stays in high precision -> what to do about it."""


def _why_nothing(evidence: LayersEvidence) -> tuple[Code, str, str]:
    """Code, cause and next step where no layer is in FP8, from the reasons why the Linears were left."""
    if evidence.converted:
        return *_who_dropped_it(evidence), "convert the model itself, or check how FP8 is switched on"
    if _could_be(evidence):
        return *_who_dropped_it(evidence), (
            "check the conversion's filter, which must give True for these names, and how FP8 is switched on"
        )
    elsewhere = "products that no nn.Linear holds (convolutions, transformers' Conv1D in GPT-2, raw parameters)"
    if not evidence.originals:
        return (
            L.NO_LINEAR_FITS,
            f"FP8 conversions take nn.Linear alone, and this model has none: {elsewhere} stay as they are",
            "write its products as nn.Linear, or ask FP8 of another model",
        )
    kinds = {reason.kind for reason in evidence.skipped.values()}
    advice = [text for kind, text in _HOW_TO_CONVERT.items() if kind in kinds]
    if Stays.SIZE in kinds:
        code, cause = _who_dropped_it(evidence)
        if code is L.NOTHING_CONVERTED:
            cause = f"no Linear that could be FP8 has sizes that it takes, multiples of 16; or {cause}"
        return code, cause, ", or ".join([*advice, "check how FP8 is switched on"])
    also = f"; {elsewhere} are never converted" if Stays.HEAD in kinds else ""
    cause = f"every nn.Linear of the model is one that stays in high precision{also}"
    return L.NO_LINEAR_FITS, cause, ", or ".join(advice)


def _who_dropped_it(evidence: LayersEvidence) -> tuple[Code, str]:
    """Which setting took FP8 away, as far as the environment and Accelerate's own state tell."""
    switches = Switches(evidence.switches.get("asked", ""), used=evidence.switches.get("accelerate", ""))
    if switches.used == FP8:
        cause = "Accelerate says that it trains in fp8: prepare() was not given this model, or filtered all its layers"
        return L.NOTHING_CONVERTED, cause
    if switches.environment == FP8:
        return decided_by(switches), who_won(switches)
    return L.NOTHING_CONVERTED, "FP8 was asked for where nothing reads it, or every layer was filtered out"


def find_in_recipe(case: Case, evidence: LayersEvidence) -> Finding | None:
    """The first layer in which another recipe was in force than the case's, or ``None``."""
    asked = {"recipe": case.recipe, **case.full_options}
    others = evidence.other_recipes(case)
    for name, seen in evidence.recipes.items():
        wrong = {
            key: (asked.get(key), seen.get(key)) for key in {**asked, POWERS: 0} if seen.get(key) != asked.get(key)
        }
        if not wrong or name in others:
            continue
        if seen.get("recipe") == "off":
            return fail(
                L.FP8_OFF,
                "FP8 was off inside the forward pass",
                expected=words(asked),
                seen=f"off, in {name}",
                cause=eval_cause(evidence) or "the forward pass ran outside the backend's precision context",
                next_step="wrap the forward pass, not the training loop's other parts",
            )
        custom = seen.get("recipe") == "custom"
        return fail(
            L.OTHER_RECIPE,
            "another recipe was in force than the one asked for",
            expected=words({key: pair[0] for key, pair in wrong.items()}),
            seen=f"{words({key: pair[1] for key, pair in wrong.items()})}, in {name}",
            cause="an option that was dropped on its way to the library"
            + (_by_accelerate(case, wrong) or ", or a conversion of your own (convert=) that takes another recipe"),
            next_step="pass the library's own recipe object"
            + ("; a configuration that is none of torchao's recipes cannot be judged" if custom else "")
            + "; for a conversion of your own put the recipe that it takes into the mark",
        )
    return None


def _by_accelerate(case: Case, wrong: Mapping[str, Any]) -> str:
    """Accelerate passes on only what differs from its own defaults, which are not Transformer Engine's."""
    through_accelerate = backend_type(case.backend).through_accelerate
    defaults = recipe_facts(case.backend, case.recipe).options
    if not through_accelerate or any(defaults.get(key) != asked for key, (asked, _) in wrong.items()):
        return ""
    return ": Accelerate's to_kwargs() leaves out what equals its own default, and the library's default is another"
