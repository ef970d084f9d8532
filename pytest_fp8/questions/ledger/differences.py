"""A difference between the arms, and what of it FP8 explains. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pytest_fp8.codes import D
from pytest_fp8.questions.layers.products import EVALUATION, FP8
from pytest_fp8.questions.ledger.evidence import TwoLedgers, enclosing
from pytest_fp8.verdicts import Finding, Verdict

LAYERS, LOSS, SPEED, MEMORY = "layers", "loss", "speedup", "memory"
EVERY = (LAYERS, LOSS, SPEED, MEMORY)
FAIL, INVALID = Verdict.FAIL, Verdict.INVALID
LIBRARIES = ("transformer_engine.", "torchao.", "unsloth")
"""How the class paths of FP8 libraries' own modules begin."""
AUTOCAST_BACKENDS = ("accelerate_", "trainer_", "unsloth_te")
"""Their users get BF16 autocast around the forward pass and outputs in float32: dtypes outside FP8 are not compared."""
OTHER_MODULES = ("te_fused", "unsloth")
"""They put modules of their own in the place of whole blocks, or compute in functions without modules. Calls, products,
operators, waits and random numbers are then others by design. What enters, weights, optimizer, switches and the numbers
of backward passes and optimizer steps are compared."""

SAME = "the arms may differ in FP8 and in nothing else: move what only one arm does out of it, or do it in both"
BRANCHES = "the step, the loss, the model or convert() does something in one arm alone"


@dataclass(frozen=True)
class Difference(Finding):
    """One value that differs between the arms and that FP8 does not explain. ``expected``: the reference's value;
    ``seen``: the FP8 arm's."""

    questions: tuple[str, ...] = EVERY
    """Those whose answer it changes. A FAIL is reported by the questions that answer for it; the others say what they
    see."""


OUTSIDE = "code outside all modules"
"""Owner of what no module called."""


class Explained:
    """What the backend and its converted layers explain."""

    def __init__(self, ledgers: TwoLedgers) -> None:
        self.autocast = ledgers.backend.startswith(AUTOCAST_BACKENDS)
        self.other_modules = ledgers.backend.startswith(OTHER_MODULES)
        self.trainer = ledgers.backend.startswith("trainer_")
        linears = set(ledgers.fp8.linears)
        libraries = {
            name
            for name, kind in ledgers.fp8.classes.items()
            if kind.startswith(LIBRARIES) and not ledgers.reference.classes.get(name, "").startswith(LIBRARIES)
        }
        trained = (owned for owned in ledgers.fp8.products if owned.product.phase != EVALUATION)
        multiplies = {owned.owner for owned in trained if owned.product.kind == FP8}
        # A Linear in whose place multiplies FP8 is an FP8 layer, of whatever class.
        own = {enclosing(owner, linears) for owner in multiplies}
        self.layers = {*ledgers.fp8.fp8_layers, *libraries, *filter(None, own)}
        self._inside = tuple(f"{name}." for name in self.layers)
        self.functions = {owner for owner in multiplies if not self.owner(owner)}
        """Modules that multiply in FP8 and are no layers: they call a function with a weight, which may be that of a
        Linear that is then not called."""
        self._unused = linears - ledgers.fp8.classes.keys()
        self.routed = ledgers.routed()
        self.work = not self.other_modules and ledgers.reference.watched and ledgers.fp8.watched
        """Whether modules, products and operators can be compared one by one."""

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


def other_work(
    what: str,
    reference: str,
    fp8: str,
    cause: str = BRANCHES,
    code: D = D.OTHER_WORK,
    questions: tuple[str, ...] = EVERY,
) -> Difference:
    return Difference(
        code,
        INVALID,
        f"the arms do not do the same work: {what}",
        about=what,
        expected=reference,
        seen=fp8,
        cause=f"{cause}: other work in one arm, so that neither times nor losses can be compared",
        next_step=SAME,
        questions=questions,
    )


def other_precision(what: str, reference: str, fp8: str) -> Difference:
    return Difference(
        D.OTHER_PRECISION,
        INVALID,
        f"another precision outside FP8: {what}",
        about=what,
        expected=reference,
        seen=fp8,
        cause="one arm computes in another precision where no FP8 layer is: autocast, .float(), .half(), a switch",
        next_step=SAME,
        questions=EVERY,
    )
