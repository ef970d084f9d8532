"""A control: one way in which FP8 training was broken, and what must name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_fp8.case import Case

EMULATED, ANYWHERE, GPU = "emulated", "anywhere", "gpu"


@dataclass(frozen=True)
class Control:
    """One broken arm, checkpoint, baseline or run."""

    id: str
    number: int
    title: str
    source: str
    """Where it happened, in public; or that users report it."""
    broken: str
    """How it is broken here."""
    question: str
    """The question that must find it: one of the five, ``baseline``, ``session`` or ``precision``."""
    cause: str
    """What the message must say, in these words."""
    case: Case | None = None
    """The pair it is run with; ``None`` where no arm is needed."""
    verdicts: tuple[str, ...] = ("FAIL",)
    """The verdicts that catch it."""
    breaks: tuple[str, ...] = ("fp8",)
    """The arms it breaks: ``fp8``, ``bf16``."""
    workload: str = ""
    """A model of :mod:`pytest_fp8.controls.models`, where it needs one of its own."""
    leaves_traces: bool = False
    """Whether it changes its arm's whole process (environment, a library's global state)."""
    needs: tuple[str, ...] = ()
    """Packages beyond the backend's own."""

    @property
    def runs(self) -> str:
        """``emulated`` (any machine, torchao's numerics), ``anywhere`` (no arm at all) or ``gpu``."""
        if self.case is None:
            return ANYWHERE
        return EMULATED if self.case.emulated else GPU


def micro(recipe: str = "tensorwise", **more: Any) -> Case:
    """The emulated case of a control: a model of 0.1 M parameters whose step takes milliseconds."""
    return Case(more.pop("model", "micro"), "torchao", recipe, emulated=True, **more)
