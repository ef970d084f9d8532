"""What one process of a training showed, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.codes import Code
from pytest_fp8.watch.attribution import Attributed
from pytest_fp8.watch.trace import Window

ON, OFF, UNKNOWN = "ON", "OFF", "UNKNOWN"


@dataclass(frozen=True)
class Note:
    """One thing that explains a verdict, or that a person should know."""

    code: Code
    text: str
    next_step: str = ""


@dataclass
class Training:
    """What one process of a training showed. ``window`` and ``found`` are there where its step was profiled."""

    evidence: Mapping[str, Any]
    verdict: str = UNKNOWN
    code: Code | None = None
    reason: str = ""
    next_step: str = ""
    share: float | None = None
    """Of the FLOPs of the layers' products and of products of no layer, those in FP8."""
    window: Window | None = None
    found: Attributed | None = None
    notes: list[Note] = field(default_factory=list)

    @property
    def emulated(self) -> bool:
        return self.window is not None and self.window.emulated > 0

    def settings(self, name: str) -> Any:
        return self.evidence.get("settings", {}).get(name)

    @property
    def layers(self) -> Sequence[Mapping[str, Any]]:
        return list(self.evidence.get("layers", ()))

    def unknown(self, code: Code, reason: str, next_step: str) -> Training:
        self.code, self.reason, self.next_step = code, reason, next_step
        return self
