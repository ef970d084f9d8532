"""Is FP8 really running? Conversion, recipe in force and executed products, judged together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from pytest_fp8.case import Case
from pytest_fp8.codes import Code, L, P
from pytest_fp8.questions.findings import SHOWN, finding, some, words
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import ABSENT, FP8, TRAINING, Attribution, StepProducts, role_table
from pytest_fp8.questions.ledger.compare import evaluated_otherwise, find_in_ledger, never_called, outermost
from pytest_fp8.questions.ledger.evidence import ArmLedger, Collective, OwnedProduct, TwoLedgers
from pytest_fp8.recipes import DGRAD, FPROP, POWERS, RECOMPUTE, ROLES, WGRAD, Role, Stays, library_of, recipe_facts
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "layers"
SHARE = "fp8_share"
STORED = {
    "fp8_layers": "fewer Linears in FP8",
    **{f"fp8_{role}": f"fewer {role} products in FP8 per step" for role in (*ROLES, RECOMPUTE)},
    SHARE: "less of the step runs in FP8",
}
"""What a baseline keeps, and what less of it is. Counts and the share of GEMM FLOPs are exact: one less fails."""
WORTH_NAMING = 0.02
"""Share of the Linears' weights, or of the step's FLOPs, above which what stays in high precision is named. Less
costs less than 2 % of the speed, a case's default ``tolerance``."""


@dataclass(frozen=True)
class LayersFigures(Figures):
    """How much of the model and of its step is in FP8."""

    linears: int
    converted: int
    """Linears in FP8, those of a class of the user's own included."""
    fp8_share: float
    """Of the step's GEMM FLOPs."""
    roles: Mapping[Role, Mapping[str, int]]
    """Role -> products that are ``expected`` of the FP8 layers, and those of them that ran in ``fp8``."""
    skipped: Mapping[str, int]
    """Reason -> Linears that stay in high precision for it."""
    notes: Sequence[str] = ()
    """What a PASS says besides."""

    def stored(self) -> dict[str, float]:
        """What a baseline keeps, without roles that did not run."""
        roles = {f"fp8_{role}": count["fp8"] for role, count in self.roles.items()}
        return {SHARE: self.fp8_share, "fp8_layers": self.converted, **roles}


def check_layers(
    case: Case,
    evidence: LayersEvidence,
    stored: Mapping[str, float] | None = None,
    ledgers: TwoLedgers | None = None,
) -> Decision:
    """FAIL names the first thing that is wrong, from what was converted to what was executed.

    ``stored``: what the baseline has of :data:`STORED`; any that is lower now, by more than rounding, fails.
    ``ledgers``: what both arms did besides FP8.
    """
    roles = recipe_facts(case.backend, case.recipe).roles
    step = evidence.step(roles)
    figures = _figures(evidence, step)

    def differs(code: Code | None = None) -> Finding | None:
        return find_in_ledger(ledgers, QUESTION, code) if ledgers is not None else None

    found = (
        find_in_conversion(case, evidence)
        or find_in_recipe(case, evidence)
        # A forward pass that is repeated in high precision has its gradients there too: it is named before them.
        or find_in_execution(case, evidence, step, (FPROP, RECOMPUTE))
        # Without gradients a layer has no gradient products: those of layers of equal sizes may be taken for them.
        or differs(L.NO_GRADIENT)
        or find_in_execution(case, evidence, step, (DGRAD, WGRAD))
        or find_on_wire(case, evidence, ledgers)
        or differs()
        # Where the reference does call the layer, that has been said.
        or find_past_layers(case, evidence)
        or less_than_stored(figures, stored or {})
        or _scaling(evidence)
    )
    if found is not None:
        return found.answer(QUESTION, figures)
    notes = beside(case, evidence, step, ledgers)
    said = f"{figures.converted} of {figures.linears} Linears in FP8, {figures.fp8_share:.1%} of the step's GEMM FLOPs"
    wire = travelled(ledgers.fp8) if ledgers is not None else ""
    on_the_wire = [f"on the wire, a step of a rank: {wire}"] if wire else []
    return passed("; ".join([said, *notes, *on_the_wire])).answer(QUESTION, replace(figures, notes=notes))


def _figures(evidence: LayersEvidence, step: StepProducts) -> LayersFigures:
    return LayersFigures(
        linears=len(evidence.originals),
        converted=len({*evidence.converted, *evidence.of_own}),
        fp8_share=step.fp8_share(),
        roles=role_table(step, evidence.calls),
        skipped=Counter(map(str, evidence.skipped.values())),
    )


def less_than_stored(figures: LayersFigures, stored: Mapping[str, float]) -> Finding | None:
    now = figures.stored()
    less = [name for name, least in stored.items() if now.get(name, 0) < least - 1e-6]
    if not less:
        return None
    name, unit = less[0], "{:.2%} of GEMM FLOPs" if less[0] == SHARE else "{:.0f}"
    expected, seen = (unit.format(each) for each in (stored[name], now.get(name, 0)))
    return finding(
        L.LESS_THAN_BASELINE, f"{expected}, exactly as stored", seen, what=f"{STORED[name]} than in the baseline"
    )


def _scaling(evidence: LayersEvidence) -> Finding | None:
    expected, stale = "a new entry in each layer's history after each step", evidence.stale_amax
    return finding(L.STALE_AMAX, expected, f"unchanged: {some(stale)}", count=len(stale)) if stale else None


# -- the conversion and the recipe in force ---------------------------------------------------------------------------

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
    code: Code = L.NOTHING_CONVERTED
    used = evidence.switches.get("accelerate", "")
    if evidence.switches.get("asked") == FP8 != used:
        # The Trainer's arguments are the likely place: nothing else turns fp8 into bf16 so often.
        by_trainer = used in ("bf16", "fp16")
        code = P.TRAINER_DECIDES if by_trainer else P.PROGRAM_DECIDES if used else P.NOTHING_READS_IT
    elif not (evidence.converted or could or any(r.kind is Stays.SIZE for r in evidence.skipped.values())):
        code = L.NO_LINEAR_FITS
    return finding(code, expected, seen, used=used)


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


# -- what one training step executed ----------------------------------------------------------------------------------

PADDING = 0.02
"""Share of bytes more than the weights take. FSDP2 pads each shard: 0.3 % with the micro model's weights, the smallest
of the suite (two ranks, gloo)."""
NOT_IN_FP8 = {
    FPROP: L.FPROP_NOT_IN_FP8,
    DGRAD: L.DGRAD_NOT_IN_FP8,
    WGRAD: L.WGRAD_NOT_IN_FP8,
    RECOMPUTE: L.RECOMPUTE_NOT_IN_FP8,
}


def find_in_execution(
    case: Case, evidence: LayersEvidence, step: StepProducts, roles: Sequence[Role]
) -> Finding | None:
    """The first thing that is wrong with what one training step executed in these roles, or ``None``."""
    owed = [a for a in step.attributions if a.layer in evidence.in_fp8 and not a.call.past]
    if not owed and all(product.kind != FP8 for product in step.foreign):
        any_called = evidence.calls or step.foreign or step.others
        seen = "no FP8 layer was called" if any_called else "no Linear was called, and no matrix product ran"
        return finding(L.NEVER_CALLED, "the model's forward pass to go through its FP8 layers", seen)
    for role in roles:
        mine = [a for a in owed if a.role == role]
        wanted = [a for a in mine if evidence.owes_fp8(case, a.layer, role)]
        if wrong := [a for a in wanted if a.kind != FP8 and not _may_be_absent(a, evidence)]:
            return _not_in_fp8(evidence, role, mine, wrong)
        if wrong := [a for a in mine if a.kind == FP8 and not evidence.owes_fp8(case, a.layer, role)]:
            recipe = evidence.recipe_of(case, wrong[0].layer)
            seen = f"{len(wrong)} of {len(mine)}: {_kinds(wrong)}"
            return finding(L.AGAINST_RECIPE, f"no {role} product in FP8", seen, role=role, recipe=recipe)
    return None


def _may_be_absent(product: Attribution, evidence: LayersEvidence) -> bool:
    """A recomputation ends as soon as it has what the backward pass needs: its last product may be absent. So may all
    of an expert that no row is sent to."""
    return product.kind == ABSENT and (product.role == RECOMPUTE or product.layer in evidence.routed)


def find_past_layers(case: Case, evidence: LayersEvidence) -> Finding | None:
    """The first role in which code multiplies with FP8 layers' weights in high precision: in place of calling the
    layers, or in the layers' own calls beside their products in FP8."""
    past = [(role, call) for call in evidence.calls if call.past for role in call.owed]
    for role in (FPROP, RECOMPUTE, DGRAD):
        found = {c.name: c for each, c in past if each == role and evidence.owes_fp8(case, c.name, role)}
        if found:
            seen = some([f"{name}, {call.ran[role].kind} by {call.by}" for name, call in found.items()])
            return finding(
                NOT_IN_FP8[role],
                "the layers' own products in FP8",
                f"their weights multiplied in high precision: {seen}",
                about=next(iter(found)),
                what=f"{role} of {len(found)} of {len(evidence.in_fp8)} layers",
                cause="the model keeps references to the unconverted modules, or multiplies with the layers' weights "
                "itself",
            )
    return None


def _not_in_fp8(
    evidence: LayersEvidence, role: str, mine: Sequence[Attribution], wrong: Sequence[Attribution]
) -> Finding:
    """Of the products ``mine`` in one role, those in ``wrong`` did not run in FP8."""
    if all(a.kind == "unknown kernel" for a in wrong):
        unknown = sorted({p.kernel for p in evidence.verified() if p.kind == "unknown kernel"})[:SHOWN]
        known = f"a family seen in known FP8 products: {', '.join((evidence.families or {}).get(FP8, []))}"
        return finding(L.UNKNOWN_KERNEL, known, ", ".join(unknown), Verdict.INCONCLUSIVE, what=role)
    of_function = role in (DGRAD, WGRAD) and wrong[0].call.by
    each = "calls" if len({a.layer for a in mine}) < len(mine) else "layers"
    return finding(
        L.GRADIENTS_NOT_IN_FP8 if of_function else NOT_IN_FP8[role],
        f"{len(mine)} {role} products in FP8",
        f"{len(mine) - len(wrong)} in FP8; {_kinds(wrong)}",
        about=wrong[0].layer,
        what=f"{role} of {len(wrong)} of {len(mine)} {each}",
        cause=eval_cause(evidence) or (AS_IT_RUNS if all(a.recorded == FP8 for a in wrong) else ""),
    )


AS_IT_RUNS = (
    "recorded uncompiled these products are in FP8, profiled as the step runs they are not: code that goes another way "
    "while it is compiled (torch.compiler.is_compiling()), or in some of its steps"
)


def _kinds(wrong: Sequence[Attribution]) -> str:
    """``bfloat16: layers.3.up; bfloat16: 1 of 32 of equal sizes, and which is not known: ...``."""
    known: dict[str, list[str]] = {}
    unknown: Counter[tuple[str, tuple[tuple[str, Role], ...]]] = Counter()
    for each in wrong:
        if each.among:
            unknown[each.kind, tuple(each.among)] += 1
        else:
            by = each.call.by if not each.layer.startswith(f"{each.call.by} (") else ""
            known.setdefault(each.kind, []).append(f"{each.layer} by {by}" if by else each.layer)
    said = [f"{kind}: {some(layers)}" for kind, layers in known.items()]
    for (kind, among), number in unknown.items():
        roles = {role for _, role in among}
        names = [layer if len(roles) == 1 else f"{role} of {layer}" for layer, role in among]
        said.append(f"{kind}: {number} of {len(among)} of equal sizes, and which is not known: {some(names)}")
    return "; ".join(said)


# -- between ranks ----------------------------------------------------------------------------------------------------


def find_on_wire(case: Case, evidence: LayersEvidence, ledgers: TwoLedgers | None) -> Finding | None:
    """FP8 all-gather that gathers BF16. Held against the reference, whose step gathers the same weights."""
    if ledgers is None or not case.options.get("float8_all_gather"):
        return None
    sizes = [prod(evidence.originals[name]) for name in evidence.sharded if name in evidence.converted]
    before, now = (_gathered(arm) for arm in (ledgers.reference, ledgers.fp8))
    promised = before - sum(sizes)
    if before and sizes and now <= promised * (1 + PADDING):
        return None
    expected = f"{_bytes(max(promised, 0))} gathered before the backward pass: BF16's {_bytes(before)}, with one byte"
    return finding(
        L.GATHERS_BF16,
        f"{expected} in place of two for each element of the {len(sizes)} converted weights that are sharded",
        f"{_bytes(now)}: {travelled(ledgers.fp8) or 'nothing travels'}",
    )


def _gathered(ledger: ArmLedger) -> int:
    """Bytes before a backward pass. An evaluation ahead of the forward pass leaves the root gathered for it."""
    phases = ("forward", "evaluation")
    return sum(c.bytes * c.count for c in ledger.wire if c.operation == "all-gather" and c.phase in phases)


def travelled(ledger: ArmLedger) -> str:
    """One rank's collectives of a step, in words; empty where there are none."""
    kinds: dict[str, list[Collective]] = {}
    for one in ledger.wire:
        kinds.setdefault(f"{one.operation} ({one.dtype})", []).append(one)
    return ", ".join(
        f"{sum(c.count for c in each)} {kind} of {_bytes(sum(c.bytes * c.count for c in each))}"
        for kind, each in kinds.items()
    )


def _bytes(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


# -- what a PASS says besides ------------------------------------------------------------------------------------------


def beside(case: Case, evidence: LayersEvidence, step: StepProducts, ledgers: TwoLedgers | None) -> list[str]:
    """What a PASS must not hide: a text for each thing that is less in FP8 than a reader expects. Workloads of several
    models may share their ``leave`` patterns."""
    said = [*_of_own(case, evidence, step), *_of_model(evidence, step)]
    said += _of_ledgers(ledgers) if ledgers is not None else ()
    # Such as a mixture's experts in one parameter, unless a wrapper of weights multiplies them in FP8.
    in_fp8 = {call.by for call in evidence.calls if call.by and not call.past}
    if stacked := [name for name in evidence.stacked_weights if name.rpartition(".")[0] not in in_fp8]:
        said.append(f"not in FP8, since no Linear holds them: {some(stacked)}")
    return said


def _of_own(case: Case, evidence: LayersEvidence, step: StepProducts) -> Iterator[str]:
    """What is in FP8 by code of the user's own, and by another recipe than the case's."""
    if others := evidence.other_recipes(case):
        named = some([f"{name} by {recipe}" for name, recipe in others.items()])
        yield f"by another recipe than {case.recipe}: {named}"
    if evidence.of_own:
        yield f"FP8 by code of your own, known by its products: {some(evidence.of_own)} (its recipe was not read)"
    functions = [call for call in evidence.calls if call.by and not call.past]
    if functions:
        where = some(list(dict.fromkeys(f"{call.name} by {call.by}" for call in functions)))
        yield f"in FP8 where no Linear is called: {where} (what else runs there was not compared)"
    if batched := [each for each in evidence.foreign if each.product.kind == FP8 and each.product.phase in TRAINING]:
        share = sum(owned.product.flops for owned in batched) / step.flops()
        yield f"{len(batched)} products in FP8 ({share:.1%} of the GEMM FLOPs) not judged by role: {callers(batched)}"


def callers(products: Sequence[OwnedProduct]) -> str:
    """``bmm of blocks.0.mix``: the operators that multiply, and the modules that call them."""
    by_flops: Counter[str] = Counter()
    for owned in products:
        by_flops[f"{owned.product.operator} of {owned.owner or 'the model itself'}"] += owned.product.flops
    return some([name for name, _ in by_flops.most_common()])


def _of_model(evidence: LayersEvidence, step: StepProducts) -> Iterator[str]:
    # Sizes alone: heads, adapters, what the workload leaves and what a library leaves by its own rule are as they
    # should be.
    weights = {name: inputs * outputs for name, (inputs, outputs) in evidence.originals.items()}
    odd = [name for name, reason in evidence.skipped.items() if reason.kind is Stays.SIZE]
    if sum(weights.get(name, 0) for name in odd) > WORTH_NAMING * sum(weights.values()):
        reasons = some(list(dict.fromkeys(evidence.skipped[name].text for name in odd)))
        stay = "Linear stays" if len(odd) == 1 else "Linears stay"
        yield f"{len(odd)} of {len(weights)} {stay} in BF16: {some(odd)} ({reasons})"
    # Raw parameters, convolutions, adapters of a class of one's own.
    share = sum(product.flops for product in step.foreign if product.kind != FP8) / step.flops()
    if share > WORTH_NAMING:
        outside = [owned for owned in evidence.foreign if owned.product.kind != FP8]
        yield f"{share:.1%} of these FLOPs are outside the Linears, in high precision: {callers(outside)}"
    if evidence.unmatched:
        yield f"leave={some([repr(pattern) for pattern in evidence.unmatched])} matches no Linear"


def _of_ledgers(ledgers: TwoLedgers) -> Iterator[str]:
    if unused := never_called(ledgers):
        layer = "1 converted layer was" if len(unused) == 1 else f"{len(unused)} converted layers were"
        yield f"{layer} not called in the step that was watched, in either arm: {some(unused)}"
    # Where one arm alone does, it is a difference.
    if otherwise := ledgers.fp8.recomputed_otherwise:
        where = some([name or "the model" for name in otherwise])
        yield f"recomputation computes something else than the first forward in both arms: {where}"
    if other := evaluated_otherwise(ledgers):
        yield f"the arms evaluate with other modules, which were not compared: {some(other)}"
    if same_on_all_ranks(ledgers.fp8):
        yield "all ranks were given one and the same batch: cut it by rank in batch(step)"
    if ledgers.fp8.ranks > 1 and not (ledgers.fp8.wire or ledgers.reference.wire):
        yield (
            "nothing travelled between the ranks in the forward and backward passes that were watched: unless the "
            "optimizer reduces gradients, each rank trains alone"
        )
    # Where a batch has no image, or by a fault.
    routed, ranks = ledgers.routed(), [{call.module for call in calls} for calls in ledgers.fp8.of_ranks()]
    less = [outermost(set.union(*ranks) - called - routed) for called in ranks]
    if any(less):
        rank = next(rank for rank, names in enumerate(less) if names)
        yield f"rank {rank} does not call what other ranks call, in either arm: {some(less[rank])}"
    if routed:
        where = some([name or "the model itself" for name in sorted(routed)])
        yield f"not compared between the arms, since its work follows from what the model computes: {where}"


def same_on_all_ranks(ledger: ArmLedger) -> bool:
    """Whether each of several ranks was given the same batch. ``batch`` lists the ranks' parts one after another."""
    part = len(ledger.batch) // ledger.ranks
    known = all(note.digest for note in ledger.batch)
    return ledger.ranks > 1 and part > 0 and known and list(ledger.batch) == [*ledger.batch[:part]] * ledger.ranks
