"""Rows of the ledger that a conversion answers for: weights before and after it, layers called. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_fp8.codes import D, L
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.ledger.differences import (
    FORGETS,
    GATHERED,
    KEEP,
    LAYERS,
    LOSS,
    Difference,
    Explained,
    differ,
    size,
)
from pytest_fp8.questions.ledger.evidence import TwoLedgers, Weight


def weights_kept(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Every parameter and buffer of the FP8 arm is after the conversion what it was before. New buffers are no
    difference: FP8 layers keep scales."""
    before, after = ledgers.fp8.before, ledgers.fp8.after

    def replaced(name: str, weight: Weight) -> bool:
        return weight.buffer and explained.owner(name.rpartition(".")[0])

    gone = [n for n, was in before.items() if not (n in after or explained.other_modules or replaced(n, was))]
    if gone:
        was, no_bias = before[gone[0]], ("", "")
        if _biases(gone):
            no_bias = (
                "the conversion put layers in place of the old ones that have no bias",
                "make the new layer with bias=old.bias is not None, and take the bias over",
            )
        expected = f"{gone[0]}, {was.dtype} {size(was.shape)}"
        seen = f"not in the converted model: {some(gone)}"
        yield differ(L.WEIGHT_GONE, gone[0], (expected, seen), (LAYERS,), *no_bias, count=len(gone))
    for name, was in before.items():
        if name not in after or replaced(name, was):
            continue
        now = after[name]
        others = (other for other, its in before.items() if other != name and its.digest == now.digest)
        other = next(others, "") if now.digest else ""
        for code, reference, fp8 in _changes(was, now, other):
            swapped = code is L.WEIGHT_CHANGED and other
            cause = f"the conversion swapped weights: {name} has what was {other}'s" if swapped else ""
            yield differ(code, name, (f"{name}: {reference}", f"{name}: {fp8}"), (LAYERS,), cause)


def _biases(names: Sequence[str]) -> bool:
    return all(name.rpartition(".")[2] == "bias" for name in names)


def _changes(was: Weight, now: Weight, other: str) -> Iterator[tuple[L, str, str]]:
    """``other``: the parameter whose values this one has now."""
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
    if explained.own_model:
        return
    reference, fp8 = ledgers.reference.before, ledgers.fp8.before
    for name in [*reference, *(n for n in fp8 if n not in reference)]:
        one, two = reference.get(name), fp8.get(name)
        facts = [(w.dtype, size(w.shape), f"content {w.digest}", w.trained) if w else ("none",) for w in (one, two)]
        if facts[0] != facts[1]:
            values = (f"{name}: {', '.join(map(str, each))}" for each in facts)
            yield differ(D.OTHER_MODEL, name, values, (LAYERS, LOSS))
            return


def layers_called(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """A converted layer that the reference's model calls is called. A layer whose rows a router chooses may rest."""
    if explained.other_modules:
        return
    ranks = zip(ledgers.reference.of_ranks(), ledgers.fp8.of_ranks(), strict=False)
    for rank, (reference, fp8) in enumerate(ranks):
        wanted, called = {c.module for c in reference if c.phase == "forward"}, {c.module for c in fp8}
        passed = [n for n in ledgers.fp8.fp8_layers if n in wanted - called and n not in explained.routed]
        if passed:
            where, name = f" on rank {rank}" if rank else "", passed[0]
            seen = f"never called{where}: {some(passed)}"
            count = len(passed)
            yield differ(L.PASSED_BY, name, (f"{name} is called{where}", seen), (LAYERS,), count=count, where=where)
            return


def weights_trained(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """What the reference's optimizer steps, the FP8 arm's steps, and nothing else."""
    reference, fp8, after = ledgers.reference.optimizer.members, ledgers.fp8.optimizer.members, ledgers.fp8.after
    if missing := sorted(reference.keys() - fp8.keys()):
        why = ("", "")
        if all(name not in after for name in missing):
            why = "the conversion dropped them: the converted model has none of that name", KEEP
        elif all(name in after and not after[name].trained for name in missing):
            why = FORGETS + "that they were trained, so that no optimizer takes them", KEEP
        elif ledgers.backend == "trainer_torchao":
            why = GATHERED
        expected, seen = f"all {len(reference)} weights that BF16 trains", f"never stepped: {some(missing)}"
        yield differ(L.NOT_IN_OPTIMIZER, missing[0], (expected, seen), (LAYERS, LOSS), *why, count=len(missing))
    elif added := sorted(fp8.keys() - reference.keys()):
        name = added[0]
        yield differ(D.OTHER_WEIGHTS_TRAINED, name, (f"{name} is in no optimizer", f"stepped: {some(added)}"))


def gradients_there(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """A weight that has a gradient in the reference has one. An expert without rows has none."""
    if explained.other_modules or not ledgers.fp8.stepped or not ledgers.reference.stepped:
        return
    have = set(ledgers.fp8.gradients)
    lost = set(ledgers.reference.gradients) - have
    missing = sorted(name for name in lost if name.rpartition(".")[0] not in explained.routed)
    if missing:
        of_bias = _biases(missing) and any(f"{bias.removesuffix('bias')}weight" in have for bias in missing)
        cause = "the FP8 layer has its bias and does not add it, or its backward pass gives the bias no gradient"
        expected, seen = f"{missing[0]} has a gradient when the optimizer steps", f"no gradient: {some(missing)}"
        count = len(missing)
        yield differ(L.NO_GRADIENT, missing[0], (expected, seen), (LAYERS,), cause if of_bias else "", count=count)
