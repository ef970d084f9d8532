"""Was the model converted as it was meant to be, and is the recipe in force the one asked for? Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fp8.case import Case
from pytest_fp8.codes import UNCODED
from pytest_fp8.questions.findings import fail, some, words
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.precision import Switches, who_won
from pytest_fp8.recipes import LIBRARIES, POWERS, recipe_facts
from pytest_fp8.verdicts import Finding

OTHER_LIBRARIES = {"torchao": "torchao.", "transformer_engine": "transformer_engine."}
"""Backend -> how the module path of its layers begins."""


def find_in_conversion(case: Case, evidence: LayersEvidence) -> Finding | None:
    """The first thing that is wrong with which layers are in FP8, or ``None``."""
    converted, skipped = set(evidence.converted), set(evidence.skipped)
    live = set(evidence.live_fp8)
    if not live:
        return _nothing_converted(case, evidence)
    if converted - live:
        return fail(
            UNCODED,
            "layers that should have been converted are not FP8 layers",
            expected=f"{len(converted)} FP8 layers",
            seen=f"not FP8: {some(converted - live)}",
            cause=_why_not_live(evidence, converted - live),
            next_step="convert last, after adapters and before compiling",
        )
    if live & skipped:
        return _converted_all_the_same(case, evidence, live & skipped)
    found = _changed_beside(evidence)
    if found is not None:
        return found
    unaccounted = set(evidence.originals) - converted - skipped
    if unaccounted:
        return fail(
            UNCODED,
            "Linears that were neither converted nor left with a reason",
            expected="a reason for each layer that stays in high precision",
            seen=some(unaccounted),
            cause="a converter that stopped at the first layer it could not take, or a filter that names no reason",
            next_step="convert it, or give it a reason to stay: Workload(leave=(name or pattern, ...))",
        )
    return None


def _converted_all_the_same(case: Case, evidence: LayersEvidence, wrong: set[str]) -> Finding:
    """Layers that were to stay in high precision are FP8 layers."""
    name = sorted(wrong)[0]
    reason = evidence.skipped[name]
    return fail(
        UNCODED,
        "a layer that was to stay in high precision is an FP8 layer",
        expected=f"{name} left alone ({reason})",
        seen=f"FP8: {some(wrong)}",
        cause="the filter did not reach the converter: what it names "
        + ("was an adapter" if reason.startswith("adapter") else "was converted with the rest"),
        next_step=_how_to_filter(case, reason),
    )


def _changed_beside(evidence: LayersEvidence) -> Finding | None:
    """What the conversion changed besides the precision."""
    if evidence.dropped_behaviour:
        return fail(
            UNCODED,
            f"{len(evidence.dropped_behaviour)} converted layer(s) lost what they did besides their product",
            expected="an FP8 layer that does all that the Linear did",
            seen=some([f"{name}: {what}" for name, what in evidence.dropped_behaviour.items()]),
            cause="the conversion puts a layer of the library's own in the Linear's place, which takes over its "
            "weights and nothing else",
            next_step="leave it in high precision, Workload(leave=(its name,)), or do that outside the Linear: in the "
            "module that calls it, or in a hook that is registered after the conversion",
        )
    return None


def eval_cause(evidence: LayersEvidence) -> str:
    """The cause, where layers in eval mode may explain why FP8 did not run; else an empty string."""
    if not evidence.in_eval:
        return ""
    return f"eval() switched FP8 off: {len(evidence.in_eval)} layers are in eval mode while the model trains"


def _how_to_filter(case: Case, reason: str) -> str:
    """torchao takes a filter; Accelerate's conversion to Transformer Engine takes none."""
    if LIBRARIES.get(case.backend, case.backend) == "torchao":
        return "pass the filter as module_filter_fn"
    first = "convert before adapters are added, or " if reason.startswith("adapter") else ""
    return f"{first}replace the layers yourself: Workload(convert=...)"


def _why_not_live(evidence: LayersEvidence, missing: set[str]) -> str:
    """Why layers were not converted. Accelerate's loop over a module's children returns at the first Linear whose sizes
    FP8 does not take: then what was not converted comes after such a Linear in the same parent."""
    order = list(evidence.originals)
    for name in sorted(missing, key=order.index):
        earlier = [n for n in order[: order.index(name)] if n.rpartition(".")[0] == name.rpartition(".")[0]]
        odd = [n for n in earlier if evidence.skipped.get(n, "").startswith("size")]
        if odd:
            return (
                f"a converter that stopped early, at {odd[0]} ({evidence.skipped[odd[0]]}): Accelerate's convert_model "
                "returns there, and the layers after it stay as they were"
            )
    return "a converter that stopped early, or a module replaced after the conversion"


def _nothing_converted(case: Case, evidence: LayersEvidence) -> Finding:
    own = OTHER_LIBRARIES.get(LIBRARIES.get(case.backend, case.backend))
    for library, path in OTHER_LIBRARIES.items():
        foreign = [name for name, kind in evidence.kinds.items() if path != own and kind.startswith(path)]
        if foreign:
            return fail(
                UNCODED,
                f"the FP8 layers are another library's: {library}",
                expected=f"layers of {case.backend}",
                seen=f"{evidence.kinds[foreign[0]]}: {some(foreign)}",
                cause="both libraries are installed and nobody said which to use: Accelerate then takes torchao",
                next_step="pass the library's own recipe object, e.g. kwargs_handlers=[TERecipeKwargs(...)]",
            )
    cause, next_step = _why_nothing(evidence)
    return fail(
        UNCODED,
        "no layer was converted to FP8",
        expected=f"FP8 layers among the model's {len(evidence.originals)} Linears",
        seen=_what_stayed(evidence),
        cause=cause,
        next_step=next_step,
    )


def _could_be(evidence: LayersEvidence) -> list[str]:
    """The Linears that nothing keeps in high precision, in the model's order."""
    return [name for name in evidence.originals if name not in evidence.skipped]


def _what_stayed(evidence: LayersEvidence) -> str:
    could = _could_be(evidence)
    if could:
        linears = (
            "1 Linear could be FP8 and is not" if len(could) == 1 else f"{len(could)} Linears could be FP8 and are not"
        )
        return f"{linears}: {some(could)}"
    return "; ".join(sorted(set(evidence.skipped.values()))) or "no Linear at all"


_HOW_TO_CONVERT = {
    "size": "make in_features and out_features multiples of 16",
    "filter": "take names or patterns out of Workload(leave=...)",
    "edge": "give the model more Linears than a first and a last, or take the backend torchao, which converts both",
    "head": "write the other products as nn.Linear",
    "adapter": "give the Linears under the adapters sizes that FP8 takes",
}
"""First word of a Linear's reason to stay in high precision -> what to do about it."""


def _why_nothing(evidence: LayersEvidence) -> tuple[str, str]:
    """Cause and next step where no layer is in FP8, from the reasons why the Linears were left."""
    if evidence.converted:
        return _who_dropped_it(evidence), "convert the model itself, or check how FP8 is switched on"
    if _could_be(evidence):
        return _who_dropped_it(evidence), (
            "check the conversion's filter, which must give True for these names, and how FP8 is switched on"
        )
    elsewhere = "products that no nn.Linear holds (convolutions, transformers' Conv1D in GPT-2, raw parameters)"
    if not evidence.originals:
        return (
            f"FP8 conversions take nn.Linear alone, and this model has none: {elsewhere} stay as they are",
            "write its products as nn.Linear, or ask FP8 of another model",
        )
    kinds = {reason.partition(":")[0] for reason in evidence.skipped.values()}
    advice = [text for kind, text in _HOW_TO_CONVERT.items() if kind in kinds]
    if "size" in kinds:
        return _who_dropped_it(evidence), ", or ".join([*advice, "check how FP8 is switched on"])
    also = f"; {elsewhere} are never converted" if "head" in kinds else ""
    return f"every nn.Linear of the model is one that stays in high precision{also}", ", or ".join(advice)


def _who_dropped_it(evidence: LayersEvidence) -> str:
    """Which setting took FP8 away, as far as the environment and Accelerate's own state tell."""
    switches = Switches(evidence.switches.get("asked", ""), used=evidence.switches.get("accelerate", ""))
    if switches.used == FP8:
        return "Accelerate says that it trains in fp8: prepare() was not given this model, or filtered all its layers"
    if switches.environment == FP8:
        return who_won(switches)
    sizes = "" if _could_be(evidence) else " or has odd sizes"
    return f"FP8 was asked for where nothing reads it, or every layer was filtered out{sizes}"


def find_in_recipe(case: Case, evidence: LayersEvidence) -> Finding | None:
    """The first layer in which another recipe was in force than the case's, or ``None``."""
    asked = {"recipe": case.recipe, **case.full_options}
    for name, seen in evidence.recipes.items():
        wrong = {
            key: (asked.get(key), seen.get(key)) for key in {**asked, POWERS: 0} if seen.get(key) != asked.get(key)
        }
        if not wrong:
            continue
        if seen.get("recipe") == "off":
            return fail(
                UNCODED,
                "FP8 was off inside the forward pass",
                expected=words(asked),
                seen=f"off, in {name}",
                cause=eval_cause(evidence) or "the forward pass ran outside the backend's precision context",
                next_step="wrap the forward pass, not the training loop's other parts",
            )
        custom = seen.get("recipe") == "custom"
        return fail(
            UNCODED,
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
    through_accelerate = case.backend.startswith(("accelerate_", "trainer_", "unsloth_te"))
    defaults = recipe_facts(case.backend, case.recipe).options
    if not through_accelerate or any(defaults.get(key) != asked for key, (asked, _) in wrong.items()):
        return ""
    return ": Accelerate's to_kwargs() leaves out what equals its own default, and the library's default is another"
