"""Rows of the ledger that a conversion answers for: weights before and after it, layers called. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pytest_fp8.codes import UNCODED
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.ledger.differences import EVERY, FAIL, INVALID, LAYERS, LOSS, Difference, Explained, size
from pytest_fp8.questions.ledger.evidence import TwoLedgers, Weight

FORGETS = "the conversion made new parameters and forgot "
KEEP = "take the parameter itself over into the new layer, new.weight = old.weight, and change nothing of it"


def weights_kept(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Every parameter and buffer of the FP8 arm is after the conversion what it was before. New buffers are no
    difference: FP8 layers keep scales."""
    before, after = ledgers.fp8.before, ledgers.fp8.after
    gone = [
        name for name, weight in before.items() if name not in after and not _replaced_buffer(name, weight, explained)
    ]
    for name in gone[:1]:
        yield Difference(
            UNCODED,
            FAIL,
            f"{len(gone)} parameter(s) or buffer(s) are gone since the conversion",
            about=name,
            expected=f"{name}, {before[name].dtype} {size(before[name].shape)}",
            seen=f"not in the converted model: {some(gone)}",
            cause="the conversion put a layer in its place that does not take it over, as a bias that is dropped",
            next_step="make the new layer with all that the old one has: bias=old.bias is not None",
            questions=(LAYERS,),
        )
    for name, was in before.items():
        if name in after and not (was.buffer and explained.owner(name.rpartition(".")[0])):
            yield from _kept(name, was, after[name], _taken_from(name, ledgers))


def _taken_from(name: str, ledgers: TwoLedgers) -> str:
    """The parameter whose values ``name`` has since the conversion; empty where it has nobody's."""
    now = ledgers.fp8.after[name].digest
    others = (other for other, was in ledgers.fp8.before.items() if other != name and was.digest == now)
    return next(others, "") if now else ""


def _replaced_buffer(name: str, weight: Weight, explained: Explained) -> bool:
    return explained.other_modules or (weight.buffer and explained.owner(name.rpartition(".")[0]))


def _kept(name: str, was: Weight, now: Weight, other: str) -> Iterator[Difference]:
    """``other``: the parameter whose values this one has now."""

    def changed(headline: str, reference: object, fp8: object, cause: str, next_step: str = KEEP) -> Difference:
        return Difference(
            UNCODED,
            FAIL,
            headline,
            f"{name}: {reference}",
            f"{name}: {fp8}",
            cause,
            next_step,
            name,
            questions=(LAYERS,),
        )

    if list(was.shape) != list(now.shape):
        yield changed(
            "a parameter has another shape since the conversion",
            size(was.shape),
            size(now.shape),
            "the conversion made a layer of other sizes, or padded or joined its weights",
        )
    elif was.dtype != now.dtype and now.digest:
        yield changed(
            "a parameter has another dtype since the conversion",
            was.dtype,
            now.dtype,
            "the conversion casts the weights that it takes over",
        )
    elif was.digest and now.digest and was.digest != now.digest:
        yield changed(
            "the conversion changed the values of a parameter or buffer",
            f"content {was.digest}",
            f"the values of {other}" if other else f"content {now.digest}",
            f"the conversion swapped weights: {name} has what was {other}'s"
            if other
            else "the weight was scaled, rounded or initialised anew on its way into the new layer",
        )
    if was.trained != now.trained:
        yield changed(
            "a frozen weight takes gradients since the conversion"
            if now.trained
            else "a trained weight is frozen since the conversion",
            f"requires_grad {was.trained}",
            f"requires_grad: {name}" if now.trained else "requires_grad False",
            FORGETS + "requires_grad: gradients are computed for nothing, or an optimizer trains what it should not"
            if now.trained
            else FORGETS + "that it was trained",
            "after the conversion, model.requires_grad_(False) for all but the adapters" if now.trained else KEEP,
        )
    if was.same_as and was.same_as != now.same_as:
        yield changed(
            "weights that were one tensor are two since the conversion",
            f"the same tensor as {was.same_as}",
            "a tensor of its own",
            "the conversion copied weights into new layers: the model was untied",
            "tie them again after the conversion, before the optimizer is made: model.tie_weights()",
        )
    if now.hooks < was.hooks:
        yield changed(
            "a hook on a parameter is gone since the conversion",
            f"{was.hooks} hook(s)",
            f"{now.hooks} hook(s)",
            "the conversion made a new parameter, and hooks stay with the old one",
            "register hooks on parameters after the conversion, or take the parameter itself over",
        )


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
                UNCODED,
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
            UNCODED,
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
            UNCODED,
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
            UNCODED,
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
            UNCODED,
            FAIL,
            f"{len(missing)} weight(s) get no gradient in the FP8 arm",
            about=name,
            expected=f"{name} has a gradient when the optimizer steps",
            seen=f"no gradient: {some(missing)}",
            cause="the FP8 layer's backward pass gives none, or the layer is cut off from the loss, as by .detach()",
            next_step="run one step without pytest-fp8 and look at this weight's .grad after loss.backward()",
            questions=(LAYERS,),
        )
