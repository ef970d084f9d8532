"""Rows of the ledger that a conversion answers for: weights before and after it, layers called. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pytest_fp8.codes import D, L
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.ledger.differences import EVERY, FAIL, INVALID, LAYERS, LOSS, Difference, Explained, size
from pytest_fp8.questions.ledger.evidence import TwoLedgers, Weight

FORGETS = "the conversion made new parameters and forgot "
KEEP = "take the parameter itself over into the new layer, new.weight = old.weight, and change nothing of it"


CHANGES = {
    L.WEIGHT_RESHAPED: (
        "a parameter has another shape",
        "the conversion made a layer of other sizes, or padded or joined its weights",
        KEEP,
    ),
    L.WEIGHT_CAST: ("a parameter has another dtype", "the conversion casts the weights that it takes over", KEEP),
    L.WEIGHT_CHANGED: (
        "a parameter or buffer has other values",
        "the weight was scaled, rounded or initialised anew on its way into the new layer",
        KEEP,
    ),
    L.TRAINS_FROZEN: (
        "a frozen weight takes gradients",
        FORGETS + "requires_grad: gradients are computed for nothing, or an optimizer trains what it should not",
        "after the conversion, model.requires_grad_(False) for all but the adapters",
    ),
    L.FREEZES_TRAINED: ("a trained weight is frozen", FORGETS + "that it was trained", KEEP),
    L.UNTIED: (
        "weights that were one tensor are two",
        "the conversion copied weights into new layers: the model was untied",
        "tie them again after the conversion, before the optimizer is made: model.tie_weights()",
    ),
    L.HOOK_GONE: (
        "a hook on a parameter is gone",
        "the conversion made a new parameter, and hooks stay with the old one",
        "register hooks on parameters after the conversion, or take the parameter itself over",
    ),
}
"""What the conversion did to a parameter -> headline, cause, next step."""


def weights_kept(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Every parameter and buffer of the FP8 arm is after the conversion what it was before. New buffers are no
    difference: FP8 layers keep scales."""
    before, after = ledgers.fp8.before, ledgers.fp8.after
    gone = [
        name for name, weight in before.items() if name not in after and not _replaced_buffer(name, weight, explained)
    ]
    for name in gone[:1]:
        yield Difference(
            L.WEIGHT_GONE,
            FAIL,
            f"{len(gone)} parameter(s) or buffer(s) are gone since the conversion",
            about=name,
            expected=f"{name}, {before[name].dtype} {size(before[name].shape)}",
            seen=f"not in the converted model: {some(gone)}",
            cause="the conversion put layers in place of the old ones that have no bias"
            if _biases(gone)
            else "the conversion put a layer in place of the old one that does not take it over",
            next_step="make the new layer with bias=old.bias is not None, and take the bias over"
            if _biases(gone)
            else KEEP,
            questions=(LAYERS,),
        )
    for name, was in before.items():
        if name in after and not (was.buffer and explained.owner(name.rpartition(".")[0])):
            yield from _kept(name, was, after[name], _taken_from(name, ledgers))


def _biases(names: Sequence[str]) -> bool:
    return all(name.rpartition(".")[2] == "bias" for name in names)


def _weight_of(bias: str) -> str:
    return f"{bias.removesuffix('bias')}weight"


def _taken_from(name: str, ledgers: TwoLedgers) -> str:
    """The parameter whose values ``name`` has since the conversion; empty where it has nobody's."""
    now = ledgers.fp8.after[name].digest
    others = (other for other, was in ledgers.fp8.before.items() if other != name and was.digest == now)
    return next(others, "") if now else ""


def _replaced_buffer(name: str, weight: Weight, explained: Explained) -> bool:
    return explained.other_modules or (weight.buffer and explained.owner(name.rpartition(".")[0]))


def _kept(name: str, was: Weight, now: Weight, other: str) -> Iterator[Difference]:
    """``other``: the parameter whose values this one has now."""
    for code, reference, fp8 in _changes(was, now, other):
        headline, cause, next_step = CHANGES[code]
        if code is L.WEIGHT_CHANGED and other:
            cause = f"the conversion swapped weights: {name} has what was {other}'s"
        seen = (f"{name}: {reference}", f"{name}: {fp8}")
        yield Difference(code, FAIL, f"{headline} since the conversion", *seen, cause, next_step, name, (LAYERS,))


def _changes(was: Weight, now: Weight, other: str) -> Iterator[tuple[L, str, str]]:
    if list(was.shape) != list(now.shape):
        yield L.WEIGHT_RESHAPED, size(was.shape), size(now.shape)
    elif was.dtype != now.dtype and now.digest:
        yield L.WEIGHT_CAST, was.dtype, now.dtype
    elif was.digest and now.digest and was.digest != now.digest:
        yield L.WEIGHT_CHANGED, f"content {was.digest}", f"the values of {other}" if other else f"content {now.digest}"
    if was.trained != now.trained:
        code = L.TRAINS_FROZEN if now.trained else L.FREEZES_TRAINED
        yield code, f"requires_grad {was.trained}", f"requires_grad {now.trained}"
    if was.same_as and was.same_as != now.same_as:
        yield L.UNTIED, f"the same tensor as {was.same_as}", "a tensor of its own"
    if now.hooks < was.hooks:
        yield L.HOOK_GONE, f"{was.hooks} hook(s)", f"{now.hooks} hook(s)"


def same_start(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Both arms build the same model. Not compared where the library loads its own, quantised one."""
    if explained.other_modules and ledgers.backend != "te_fused":
        return
    reference, fp8 = ledgers.reference.before, ledgers.fp8.before
    for name in [*reference, *(n for n in fp8 if n not in reference)]:
        one, two = reference.get(name), fp8.get(name)
        facts = [(w.dtype, size(w.shape), f"content {w.digest}", w.trained) if w else ("none",) for w in (one, two)]
        if facts[0] != facts[1]:
            yield Difference(
                D.OTHER_MODEL,
                INVALID,
                "the arms do not build the same model",
                about=name,
                expected=f"{name}: {', '.join(map(str, facts[0]))}",
                seen=f"{name}: {', '.join(map(str, facts[1]))}",
                cause="build() gives other weights in each process: it draws them from a generator that torch does not "
                "seed, or it looks at how FP8 is switched on",
                next_step="draw weights with torch's own generators, which are seeded before each build()",
                questions=(LAYERS, LOSS),
            )
            return


def layers_called(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """A converted layer that the reference's model calls is called. A layer whose rows a router chooses may rest."""
    if explained.other_modules:
        return
    ranks = zip(ledgers.reference.of_ranks(), ledgers.fp8.of_ranks(), strict=False)
    for rank, (reference, fp8) in enumerate(ranks):
        wanted, called = {c.module for c in reference if c.phase == "forward"}, {c.module for c in fp8}
        passed = [n for n in ledgers.fp8.fp8_layers if n in wanted - called and n not in explained.routed]
        if not passed:
            continue
        where = f" on rank {rank}" if rank else ""
        yield Difference(
            L.PASSED_BY,
            FAIL,
            f"{len(passed)} converted layer(s) are never called, which the reference calls{where}",
            about=passed[0],
            expected=f"{passed[0]} is called{where}",
            seen=f"never called{where}: {some(passed)}",
            cause="the FP8 arm goes past the layer: a block that keeps a reference to the unconverted module or to the "
            "weight, F.linear(x, layer.weight), or a forward pass that looks at the layer's class",
            next_step="call the layer itself, and convert before anything takes references to layers; where it is a "
            "library that goes past them, they run in BF16 all the same: Workload(leave=(names,)) says so",
            questions=(LAYERS,),
        )
        return


def _why_not_stepped(missing: Sequence[str], after: Mapping[str, Weight]) -> tuple[str, str]:
    """Cause and next step for weights that the FP8 arm's optimizer does not have. ``after``: the converted model's."""
    if all(name not in after for name in missing):
        return "the conversion dropped them: the converted model has none of that name", KEEP
    if all(name in after and not after[name].trained for name in missing):
        return FORGETS + "that they were trained, so that no optimizer takes them", KEEP
    return (
        "the optimizer was made before the conversion, which put new parameters in place of its own",
        "make the optimizer after the conversion; in the Trainer with torchao set "
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false",
    )


def weights_trained(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """What the reference's optimizer steps, the FP8 arm's steps, and nothing else."""
    reference, fp8 = ledgers.reference.optimizer.members, ledgers.fp8.optimizer.members
    missing = sorted(set(reference) - set(fp8))
    for name in missing[:1]:
        cause, next_step = _why_not_stepped(missing, ledgers.fp8.after)
        yield Difference(
            L.NOT_IN_OPTIMIZER,
            FAIL,
            f"{len(missing)} weights are in no optimizer of the FP8 arm",
            about=name,
            expected=f"all {len(reference)} weights that BF16 trains",
            seen=f"never stepped: {some(missing)}",
            cause=cause,
            next_step=next_step,
            questions=(LAYERS, LOSS),
        )
    added = [] if missing else sorted(set(fp8) - set(reference))
    for name in added[:1]:
        yield Difference(
            D.OTHER_WEIGHTS_TRAINED,
            INVALID,
            "the FP8 arm trains weights that the reference does not train",
            about=name,
            expected=f"{name} is in no optimizer",
            seen=f"stepped: {some(added)}",
            cause="the conversion added parameters or made frozen ones trainable, and the optimizer was given them",
            next_step="give both arms' optimizers the same parameters",
            questions=EVERY,
        )


def gradients_there(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """A weight that has a gradient in the reference has one. An expert without rows has none."""
    if explained.other_modules or not ledgers.fp8.stepped or not ledgers.reference.stepped:
        return
    lost = set(ledgers.reference.gradients) - set(ledgers.fp8.gradients)
    missing = sorted(name for name in lost if name.rpartition(".")[0] not in explained.routed)
    for name in missing[:1]:
        yield Difference(
            L.NO_GRADIENT,
            FAIL,
            f"{len(missing)} weight(s) get no gradient in the FP8 arm",
            about=name,
            expected=f"{name} has a gradient when the optimizer steps",
            seen=f"no gradient: {some(missing)}",
            cause="the FP8 layer has its bias and does not add it, or its backward pass gives the bias no gradient"
            if _biases(missing) and any(_weight_of(bias) in ledgers.fp8.gradients for bias in missing)
            else "the FP8 layer's backward pass gives none, or the layer is cut off from the loss, as by .detach()",
            next_step="run one step without pytest-fp8 and look at this weight's .grad after loss.backward()",
            questions=(LAYERS,),
        )
