"""A difference between the arms, and what of it FP8 explains. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pytest_fp8.codes import Code, L
from pytest_fp8.questions.findings import finding
from pytest_fp8.questions.layers.products import EVALUATION, FP8
from pytest_fp8.questions.ledger.evidence import TwoLedgers, enclosing
from pytest_fp8.recipes import backend_type
from pytest_fp8.verdicts import Finding, Verdict

LAYERS, LOSS, SPEED, MEMORY = "layers", "loss", "speedup", "memory"
EVERY = (LAYERS, LOSS, SPEED, MEMORY)
LIBRARIES = ("transformer_engine.", "torchao.", "unsloth")
"""How the class paths of FP8 libraries' own modules begin."""


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


def differ(
    code: Code, about: str, values: Iterable[str], questions: tuple[str, ...] = EVERY, **given: object
) -> Difference:
    """A difference in the words of its code. ``values``: the reference's and the FP8 arm's. ``given``: what the words
    leave open, and ``cause`` and ``next_step`` where more is known of it."""
    reference, fp8 = values
    verdict = Verdict.FAIL if isinstance(code, L) else Verdict.INVALID
    found = finding(code, reference, fp8, verdict, about=about, **given)  # type: ignore[arg-type]
    return Difference(**vars(found), questions=questions)
