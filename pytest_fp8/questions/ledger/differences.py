"""A difference between the arms, and what of it FP8 explains. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pytest_fp8.codes import Code, D, L
from pytest_fp8.questions.layers.products import EVALUATION, FP8
from pytest_fp8.questions.ledger.evidence import TwoLedgers, enclosing
from pytest_fp8.recipes import backend_type
from pytest_fp8.verdicts import Finding, Verdict

LAYERS, LOSS, SPEED, MEMORY = "layers", "loss", "speedup", "memory"
EVERY = (LAYERS, LOSS, SPEED, MEMORY)
FAIL, INVALID = Verdict.FAIL, Verdict.INVALID
LIBRARIES = ("transformer_engine.", "torchao.", "unsloth")
"""How the class paths of FP8 libraries' own modules begin."""


@dataclass(frozen=True)
class Difference(Finding):
    """One value that differs between the arms and that FP8 does not explain. ``expected``: the reference's value;
    ``seen``: the FP8 arm's."""

    questions: tuple[str, ...] = EVERY
    """Those whose answer it changes. A FAIL is reported by the questions that answer for it; the others say what they
    see."""


GATHERED = (
    "Accelerate's default enable_fsdp_float8_all_gather, with or without FSDP, wraps weights into new parameters, and "
    "the Trainer makes its optimizer before",
    'options={"fp8_all_gather": False} in this test\'s mark, whose arms set their own environment; in the script '
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false",
)
"""Why weights are in no optimizer under the Trainer with torchao, and what to do."""
OUTSIDE = "code outside all modules"
"""Owner of what no module called."""


class Explained:
    """What the backend and its converted layers explain: dtypes, modules, and whose work follows from numbers."""

    def __init__(self, ledgers: TwoLedgers) -> None:
        backend, reference, fp8 = backend_type(ledgers.backend), ledgers.reference, ledgers.fp8
        self.backend = ledgers.backend
        self.dtypes = not backend.through_accelerate
        """Whether dtypes outside FP8 are compared."""
        self.other_modules = backend.other_modules or not (reference.watched and fp8.watched)
        """Whether modules, products and operators are others by design, or were not watched."""
        self.routed = ledgers.routed()
        """Modules whose work follows from numbers that the model computes."""
        self.stepped_by_both = reference.optimizer.members.keys() & fp8.optimizer.members.keys()
        linears = set(fp8.linears)
        self.linears = linears.union(reference.linears)
        libraries = {
            name
            for name, kind in fp8.classes.items()
            if kind.startswith(LIBRARIES) and not reference.classes.get(name, "").startswith(LIBRARIES)
        }
        multiplies = {
            owned.owner for owned in fp8.products if owned.product.phase != EVALUATION and owned.product.kind == FP8
        }
        # A Linear in whose place multiplies FP8 is an FP8 layer, of whatever class.
        own = {enclosing(owner, linears) for owner in multiplies}
        self.layers = {*fp8.fp8_layers, *libraries, *filter(None, own)}
        self._inside = tuple(f"{name}." for name in self.layers)
        self.functions = {owner for owner in multiplies if not self.owner(owner)}
        """Modules that multiply in FP8 and are no layers: they call a function with a weight, which may be that of a
        Linear that is then not called."""
        self._unused = linears - fp8.classes.keys()

    def caller(self, name: str) -> str:
        """``name``; of a Linear that the FP8 arm does not call, the module that multiplies with its weight in FP8."""
        parents = [parent for parent in self.functions if not parent or name.startswith(f"{parent}.")]
        return max(parents, key=len, default=name) if name in self._unused else name

    def inside(self, name: str) -> bool:
        """Whether a module or weight lies inside a converted layer."""
        return name.startswith(self._inside)

    def owner(self, name: str) -> bool:
        """Whether what a module owns is a converted layer's, or an FP8 library's."""
        return name in self.layers or self.inside(name)


def outermost(names: Collection[str]) -> list[str]:
    """The names that lie inside no other of them."""
    chosen = set(names)
    if "" in chosen:
        return [""]
    parts = {name: name.split(".") for name in chosen}
    return sorted(
        name
        for name in chosen
        if not any(".".join(parts[name][:size]) in chosen for size in range(1, len(parts[name])))
    )


def size(shape: object) -> str:
    """``4x128``; ``one number`` for a tensor without dimensions."""
    return "x".join(map(str, shape)) or "one number"  # type: ignore[call-overload]


KEEP = "take the parameter itself over into the new layer, new.weight = old.weight, and change nothing of it"
FORGETS = "the conversion made new parameters and forgot "
SAME = "the arms may differ in FP8 and in nothing else: move what only one arm does out of it, or do it in both"
BRANCHES = "the step, the loss, the model or convert() does something in one arm alone"
NOT_THE_SAME = ("the arms do not do the same work: {about}", BRANCHES, SAME)
WORDS: Mapping[Code, tuple[str, str, str]] = {
    L.WEIGHT_GONE: (
        "{count} parameter(s) or buffer(s) are gone since the conversion",
        "the conversion put a layer in place of the old one that does not take it over",
        KEEP,
    ),
    L.WEIGHT_RESHAPED: (
        "a parameter has another shape since the conversion",
        "the conversion made a layer of other sizes, or padded or joined its weights",
        KEEP,
    ),
    L.WEIGHT_CAST: (
        "a parameter has another dtype since the conversion",
        "the conversion casts the weights that it takes over",
        KEEP,
    ),
    L.WEIGHT_CHANGED: (
        "a parameter or buffer has other values since the conversion",
        "the weight was scaled, rounded or initialised anew on its way into the new layer",
        KEEP,
    ),
    L.TRAINS_FROZEN: (
        "a frozen weight takes gradients since the conversion",
        FORGETS + "requires_grad: gradients are computed for nothing, or an optimizer trains what it should not",
        "after the conversion, model.requires_grad_(False) for all but the adapters",
    ),
    L.FREEZES_TRAINED: (
        "a trained weight is frozen since the conversion",
        FORGETS + "that it was trained",
        KEEP,
    ),
    L.UNTIED: (
        "weights that were one tensor are two since the conversion",
        "the conversion copied weights into new layers: the model was untied",
        "tie them again after the conversion, before the optimizer is made: model.tie_weights()",
    ),
    L.HOOK_GONE: (
        "a hook on a parameter is gone since the conversion",
        "the conversion made a new parameter, and hooks stay with the old one",
        "register hooks on parameters after the conversion, or take the parameter itself over",
    ),
    L.PASSED_BY: (
        "{count} converted layer(s) are never called, which the reference calls{where}",
        "the FP8 arm goes past the layer: a block that keeps a reference to the unconverted module or to the weight, "
        "F.linear(x, layer.weight), or a forward pass that looks at the layer's class",
        "call the layer itself, and convert before anything takes references to layers; where it is a library that "
        "goes past them, they run in BF16 all the same: Workload(leave=(names,)) says so",
    ),
    L.NOT_IN_OPTIMIZER: (
        "{count} weights are in no optimizer of the FP8 arm",
        "the optimizer was made before the conversion, which put new parameters in place of its own",
        "make the optimizer after the conversion",
    ),
    L.NO_GRADIENT: (
        "{count} weight(s) get no gradient in the FP8 arm",
        "the FP8 layer's backward pass gives none, or the layer is cut off from the loss, as by .detach()",
        "run one step without pytest-fp8 and look at this weight's .grad after loss.backward()",
    ),
    D.OTHER_MODEL: (
        "the arms do not build the same model",
        "build() gives other weights in each process: it draws them from a generator that torch does not seed, or it "
        "looks at how FP8 is switched on",
        "draw weights with torch's own generators, which are seeded before each build()",
    ),
    D.OTHER_WEIGHTS_TRAINED: (
        "the FP8 arm trains weights that the reference does not train",
        "the conversion added parameters or made frozen ones trainable, and the optimizer was given them",
        "give both arms' optimizers the same parameters",
    ),
    D.OTHER_DATA: (
        "the arms trained on different data",
        "batches that do not depend on seed and step alone: another seed, a shuffle, a loader's generator, a loader "
        "that keeps its place from step to step",
        "draw the batch inside batch(step) with torch's own generators, which are seeded for each step",
    ),
    D.OTHER_INPUTS: (
        "the arms' models are given other inputs, made of the same batch",
        "batch() gives both arms the same tensors, and loss() or the step makes other inputs of them in one arm: "
        "padding on another side, a mask, a shuffle, data of its own",
        "prepare the inputs in batch(step), or in the same way in both arms",
    ),
    D.OTHER_SWITCH: (
        "another precision or setting outside FP8: {about}",
        "convert(), precision(), build() or a library set it in one arm's process alone, so that this switch is "
        "measured besides FP8",
        "set it in build(), which runs in both arms",
    ),
    D.OTHER_OPTIMIZER: (
        "the arms' optimizers differ: {about}",
        "optimizer() looks at the model or its parameters' classes, a schedule is in another place, or convert() made "
        "or changed an optimizer",
        "give both arms the same optimizer, with the same settings for each parameter",
    ),
    D.OTHER_UPDATES: (
        "the same gradients give other updates in the FP8 arm: the optimizer's own rule differs",
        "the optimizer rounds, clips or scales by itself in one arm alone: rounding of weights or gradients, a bound "
        "on updates, a rate that the step sets, a rate or state that is in no parameter group",
        "make the same optimizer with the same attributes in both arms, and compare one step on equal gradients",
    ),
    D.OTHER_RANDOM_NUMBERS: (
        "the arms draw other random numbers in the same step",
        "dropout, noise or sampling in one arm alone, or of other sizes",
        "draw the same random numbers in both arms: seed before the step alone, and compare torch.get_rng_state() of "
        "both arms before this operator",
    ),
    D.OTHER_CLIPPING: ("gradients are clipped or scaled in one arm alone", BRANCHES, SAME),
    D.RECOMPUTED_OTHERWISE: (
        "recomputation computes something else than the first forward in one arm alone",
        "recomputation computes something else than the first forward (random state not preserved?): the gradients are "
        "those of another dropout mask or noise; seen at {layer}",
        "checkpoint(..., preserve_rng_state=True), and nothing in the recomputed part that changes from call to call",
    ),
    D.OTHER_WAITS: (
        "{arm} waits for the GPU where the other arm does not",
        "a value read by .item(), float() or if in each step, a copy to the CPU, a synchronisation, a sleep: the arm "
        "that waits is slower by that, and not by its precision",
        "log values in neither arm, or keep them on the GPU and read them every hundred steps in both",
    ),
    D.OTHER_PRECISION: (
        "another precision outside FP8: {about}",
        "one arm computes in another precision where no FP8 layer is: autocast, .float(), .half(), a switch",
        SAME,
    ),
    D.OTHER_OPERATOR_SETTING: (
        NOT_THE_SAME[0],
        "settings differ, as the rate of a dropout, the epsilon of a norm, how a loss is reduced or weighted",
        SAME,
    ),
    **dict.fromkeys((D.OTHER_WORK, D.OTHER_PASSES, D.OTHER_MODE, D.OTHER_RECOMPUTATION), NOT_THE_SAME),
}
"""Code -> headline, the cause where a row says no other, next step."""


def differ(
    code: Code,
    about: str,
    values: Iterable[str],
    questions: tuple[str, ...] = EVERY,
    cause: str = "",
    next_step: str = "",
    **given: object,
) -> Difference:
    """A difference in the words of its code. ``values``: the reference's and the FP8 arm's. ``given``: what the words
    leave open."""
    headline, usual, then = WORDS[code]
    cause = cause or usual.format(**given)
    if WORDS[code] is NOT_THE_SAME:
        cause += ": other work in one arm, so that neither times nor losses can be compared"
    verdict = FAIL if isinstance(code, L) else INVALID
    headline = headline.format(about=about, **given)
    reference, fp8 = values
    return Difference(code, verdict, headline, reference, fp8, cause, next_step or then, about, questions)
