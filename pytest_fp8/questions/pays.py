"""Where does FP8 pay? Which classes of layers and which recipe gain time here: what is asked, what the figures
recommend, and what measuring the recommended set said. It judges nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pytest_fp8.case import Case
from pytest_fp8.codes import R
from pytest_fp8.plan import FP8, Ask, Asking, TwoArms
from pytest_fp8.questions.asks import fp8_layers, layers_of
from pytest_fp8.questions.findings import finding
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import LayerCall
from pytest_fp8.questions.speed.account import IDLE, Account
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.recipes import Role, known_backend, library_of
from pytest_fp8.stats.estimate import Estimate, estimate_of, ratios_by_process
from pytest_fp8.stats.looks import BESIDE
from pytest_fp8.verdicts import Decision, Figures, Verdict, passed

QUESTION = "pays"
OWN_CONVERSION = "convert() of the workload decides what is in FP8"
BF16 = "bf16"
"""What stands for a recipe where a class is in high precision."""
WORTH = 0.005
"""Share of BF16's step that a change of set or recipe must promise to be recommended: two processes differ by that."""
FUSED_LEAST = 0.1
"""Of what casts cost alone, the least that fusing leaves of them."""


def pattern_of(name: str) -> str:
    """A layer's name with ``*`` for numbers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


@dataclass(frozen=True)
class LayerClass:
    """FP8 layers of one name and size, in all blocks."""

    layer: str
    """The first of them."""
    pattern: str
    """Of their names, with ``*`` for numbers: what ``Workload(leave=...)`` takes."""
    in_features: int
    out_features: int
    rows: int
    count: int
    """Calls in a step."""
    owed: tuple[Role, ...]


def classes_of(layers: LayersEvidence) -> list[LayerClass]:
    """The FP8 layers of a step by class, in the model's order."""
    calls: dict[tuple[str, int, int], list[LayerCall]] = {}
    for call in layers.calls:
        if call.name in layers.in_fp8 & layers.originals.keys() and not call.by:
            calls.setdefault((pattern_of(call.name), call.in_features, call.out_features), []).append(call)
    return [
        LayerClass(same[0].name, *sizes, round(median(call.rows for call in same)), len(same), tuple(same[0].owed))
        for sizes, same in calls.items()
    ]


@dataclass(frozen=True)
class Alone:
    """Milliseconds of the GPU in one forward and backward pass of layers that share an input, with nothing around."""

    products: float
    rest: float
    """Casts, scales and transposes."""


@dataclass(frozen=True)
class InRecipe:
    """Times of a group in one recipe."""

    all: Alone
    without: Sequence[Alone]
    """With each member in high precision and the others in FP8."""


@dataclass(frozen=True)
class Group:
    """Classes whose layers are given the same input, which is cast once for all of them."""

    members: Sequence[int]
    """Of the classes, by their index."""
    none: Alone
    """All in high precision."""
    recipes: Mapping[str, InRecipe]


@dataclass(frozen=True)
class AloneEvidence:
    groups: Sequence[Group]


@dataclass(frozen=True)
class Gain:
    """What a class gains in one recipe over high precision, in milliseconds a step, while its group is in FP8."""

    earned: float
    """By its products."""
    casts: float
    """What its own casts cost: not that of the input that the group shares."""

    @property
    def net(self) -> float:
        return self.earned - self.casts


@dataclass(frozen=True)
class GroupGain:
    """What a group gains in one recipe, in milliseconds a step."""

    members: tuple[int, ...]
    gains: Sequence[Gain]
    """Of each member."""
    shared: float
    """What casts cost that are made once for all members."""

    @property
    def all(self) -> float:
        return sum(gain.net for gain in self.gains) - self.shared

    def best(self) -> tuple[float, list[int]]:
        """The most that a choice of members gains, and the members that it leaves in high precision."""
        left = [index for index, gain in zip(self.members, self.gains, strict=True) if gain.net < 0]
        some = sum(max(0.0, gain.net) for gain in self.gains) - self.shared
        return (some, left) if some > 0 else (0.0, list(self.members))

    def fused(self, share: float) -> GroupGain:
        """The same where a step pays so much of what casts cost alone."""
        gains = [Gain(gain.earned, gain.casts * share) for gain in self.gains]
        return GroupGain(self.members, gains, self.shared * share)


Gains = Mapping[str, Sequence[GroupGain]]
"""Recipe -> the gains of each group."""


@dataclass(frozen=True)
class Advice:
    """What the figures recommend."""

    recipe: str
    """:data:`BF16` where no class gains in any."""
    leave: tuple[str, ...] = ()
    """Patterns of the classes that are left in high precision."""
    promised: float = 0.0
    """Milliseconds a step that it gains over what the case has now."""


def gains_of(classes: Sequence[LayerClass], groups: Sequence[Group]) -> Gains:
    """As the layers are alone."""
    recipes = groups[0].recipes if groups else ()
    return {recipe: [_gain(classes, group, group.recipes[recipe]) for group in groups] for recipe in recipes}


def _gain(classes: Sequence[LayerClass], group: Group, times: InRecipe) -> GroupGain:
    counts = [classes[index].count for index in group.members]
    gains = [
        Gain(count * (without.products - times.all.products), count * (times.all.rest - without.rest))
        for count, without in zip(counts, times.without, strict=True)
    ]
    casts = max(counts) * (times.all.rest - group.none.rest)
    return GroupGain(tuple(group.members), gains, casts - sum(gain.casts for gain in gains))


def fused_share(account: Account | None, gains: Sequence[GroupGain]) -> float:
    """How much of what casts cost alone the whole step pays: compiled code computes a cast inside a kernel that is
    there anyway. 1 where it is not known."""
    alone = sum(group.shared + sum(gain.casts for gain in group.gains) for group in gains)
    if account is None or alone <= 0:
        return 1.0
    return min(1.0, max(FUSED_LEAST, account.casts / alone))


def advised(classes: Sequence[LayerClass], gains: Gains, recipe: str, step: float) -> Advice:
    """The best recipe, and which classes it leaves in high precision. What promises less than :data:`WORTH` of the
    step over ``recipe`` with all classes in FP8 is not recommended. ``step``: milliseconds of BF16's. Pure."""
    now = sum(group.all for group in gains[recipe])
    best, promised = Advice(recipe), WORTH * step
    for name, found in gains.items():
        everything = Advice(name, (), sum(group.all for group in found) - now)
        chosen = [group.best() for group in found]
        left = sorted(index for _, members in chosen for index in members)
        patterns = tuple(classes[index].pattern for index in left)
        named = name if len(left) < len(classes) else BF16
        some = Advice(named, patterns, sum(value for value, _ in chosen) - now)
        # A set is worth its leaving out only beyond what the whole recipe gives.
        for advice, more in ((everything, 0.0), (some, WORTH * step)):
            if advice.promised > promised and advice.promised >= everything.promised + more:
                best, promised = advice, advice.promised
    return best


@dataclass(frozen=True)
class Proof:
    """The recommended arm against the case's own FP8 arm, in blocks that alternated."""

    change: Estimate
    """Log ratio: above 0 where the recommended arm is faster."""
    kept: Sequence[str] = ()
    """Layers that were to be left and are in FP8 all the same."""
    disturbed: str = ""


def alone_of(case: Case, layers: LayersEvidence) -> Asking[AloneEvidence]:
    """The times of all classes by themselves, in high precision and in each recipe of the library that this GPU can
    run."""
    recipes = [facts.name for facts in known_backend(library_of(case.backend)).recipes]
    asked = dict.fromkeys([case.recipe] if layers.own_conversion else [case.recipe, *recipes])
    shapes = [
        [each.layer, each.in_features, each.out_features, each.rows, list(each.owed)] for each in classes_of(layers)
    ]
    found: AloneEvidence = yield Ask(FP8, "alone", AloneEvidence, layers=shapes, recipes=list(asked))
    return found


def proof_of(arms: TwoArms, left: Sequence[str]) -> Asking[Proof]:
    """``arms``: the case's FP8 arm as the reference, the recommended one as the other."""
    timer = BlockTimer(arms)
    yield from timer.measure(BESIDE.pairs[0], BESIDE.blocks, layers_of)
    layers = yield from layers_of(FP8)
    gone = {pattern_of(name): name for name in layers.in_fp8}
    seen = timer.beside
    return Proof(
        estimate_of(ratios_by_process(timer.reference, timer.other)),
        [gone[pattern] for pattern in left if pattern in gone],
        "; ".join([*seen.throttles, *(f"process {pid} used the GPU" for pid in seen.strangers)]),
    )


@dataclass(frozen=True)
class PaysFigures(Figures):
    """What was asked of the case's arms, and what it says. Milliseconds a step, and ratios."""

    recipe: str
    bf16_ms: float
    fp8_ms: float
    classes: Sequence[LayerClass]
    gains: Gains
    """In the step."""
    fused: float
    """The share of the casts alone that the step pays."""
    advice: Advice
    idle: float
    """Share of the FP8 arm's step in which the GPU waits for its host."""
    own_conversion: bool
    change: float | None = None
    """By which the recommended arm was faster than the case's FP8 arm, as a fraction; ``None``: not measured."""
    change_error: float | None = None
    """Half of its 99 % interval."""
    notes: Sequence[str] = ()
    """The table and the recommendation in words."""

    @property
    def speedup(self) -> float:
        """Of the case over BF16."""
        return self.bf16_ms / self.fp8_ms

    @property
    def measurable(self) -> bool:
        """Whether an arm can be built as it is recommended, and is another than the case's."""
        changes = (self.advice.recipe, self.advice.leave) != (self.recipe, ()) and self.advice.recipe != BF16
        return changes and not self.own_conversion


def pays_of(arms: TwoArms, timing: Asking[TimingEvidence]) -> Asking[PaysFigures]:
    """What the figures say and recommend."""
    recipe, times = arms.case.recipe, (yield from timing)
    layers = yield from fp8_layers()
    alone = yield from alone_of(arms.case, layers)
    classes, account = classes_of(layers), times.account()
    found = gains_of(classes, alone.groups)
    fused = fused_share(account, found.get(recipe, ()))
    gains = {name: [group.fused(fused) for group in groups] for name, groups in found.items()}
    bf16, fp8 = (median(step for process in arm for step in process) for arm in (times.bf16, times.fp8))
    advice = advised(classes, gains, recipe, bf16) if gains else Advice(recipe)
    idle = account.fp8.idle_share if account is not None else 0.0
    return PaysFigures(recipe, bf16, fp8, classes, gains, fused, advice, idle, layers.own_conversion)


def not_of(case: Case) -> Decision:
    """The library builds the model and converts it itself."""
    expected, seen = "a backend that converts layers of a model", f"{case.backend}, whose library builds the model"
    given = {"case": case.id, "question": "where FP8 pays"}
    return finding(R.NOT_ASKED_OF_THIS_CASE, expected, seen, Verdict.NOT_EXERCISED, **given).answer(QUESTION)


def told(case: Case, found: PaysFigures, proof: Proof | None, why_not: str = "") -> Decision:
    """The answer: it passes, whatever pays. ``why_not``: why what is recommended was not measured."""
    words = _recommended(found, proof, why_not)
    if found.idle > IDLE:
        words += f"; the FP8 arm waits for its host {found.idle:.0%} of its step"
    figures = replace(found, notes=["\n".join([f"{case.id}: {words}", *table(found)])])
    if proof is not None:
        figures = replace(figures, change=proof.change.change, change_error=proof.change.half_width)
    return passed(words).answer(QUESTION, figures)


def _recommended(found: PaysFigures, proof: Proof | None, why_not: str) -> str:
    advice, speedup = found.advice, found.speedup
    if advice.recipe == BF16:
        return f"no class of layers pays in any recipe: {speedup:.3f}x, and the figures recommend BF16"
    if (advice.recipe, advice.leave) == (found.recipe, ()):
        return f"{speedup:.3f}x, and no other set of layers or recipe promises more"
    what = [f"recipe {advice.recipe}"] if advice.recipe != found.recipe else []
    if advice.leave:
        what.append(f"leaving {' and '.join(map(_last, advice.leave))} in BF16")
    change = f"{' and '.join(what)} promises {advice.promised:.1f} ms of {found.bf16_ms:.1f}"
    if proof is not None and proof.kept:
        why_not = f"{proof.kept[0]} is in FP8 all the same"
    if proof is None or why_not:
        return f"{speedup:.3f}x; {change}, not measured: {why_not or OWN_CONVERSION}"
    now, error = speedup * proof.change.ratio, speedup * proof.change.half_width
    proven = abs(proof.change.theta) > proof.change.half_width
    verdict = "measured" if not proven else "measured faster" if proof.change.theta > 0 else "measured slower"
    disturbed = f" (disturbed: {proof.disturbed})" if proof.disturbed else ""
    return f"{change}; {verdict}: {now:.3f}x instead of {speedup:.3f}x, +-{error:.3f}{disturbed}"


def _last(pattern: str) -> str:
    return pattern.rpartition(".")[2]


def table(found: PaysFigures) -> list[str]:
    """A line per class: per recipe what its products earn, what its casts cost in the step, and what is left; and a
    line per group for the casts of the input that its classes share."""
    if not found.classes:
        return []
    rows = [("", "", list(found.gains)), ("", "", ["earned - casts = net ms"] * len(found.gains))]
    for index, each in enumerate(found.classes):
        size = f"{each.in_features} to {each.out_features}, {each.rows} tokens, {each.count} calls"
        gains = [
            group.gains[group.members.index(index)]
            for groups in found.gains.values()
            for group in groups
            if index in group.members
        ]
        cells = [f"{gain.earned:.2f} - {gain.casts:.2f} = {gain.net:+.2f}" for gain in gains]
        rows.append((_last(each.pattern), size, cells))
    for groups in zip(*found.gains.values(), strict=True):
        if len(members := groups[0].members) > 1:
            names = ", ".join(_last(found.classes[index].pattern) for index in members)
            rows.append((f"their input: {names}", "", [f"{-group.shared:+.2f}" for group in groups]))
    wide = [max(len(row[place]) for row in rows) for place in (0, 1)]
    lines = [
        f"  {name:{wide[0]}}  {size:{wide[1]}}" + "".join(f"{cell:>26}" for cell in cells) for name, size, cells in rows
    ]
    return [*lines, f"  in the step casts cost {found.fused:.2f} of what they cost alone"]
