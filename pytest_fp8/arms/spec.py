"""What an arm's process is told before it starts: one plain value that travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_fp8.case import Case


@dataclass(frozen=True)
class ArmSpec:
    """A case as one arm sees it. ``workload`` is shipped text, or ``None`` for a model of the zoo."""

    case: Case
    device: str
    """``cuda`` or ``cpu``; an arm that cannot have it fails, it never takes another."""
    workload: str | None = None
    threads: int | None = None
    """CPU threads; ``None`` leaves torch's own choice."""
    control: str | None = None
    """Import path (``module:Class``) of the control that breaks this arm; ``None`` for every arm that is measured in
    earnest."""

    @property
    def name(self) -> str:
        return f"{self.case.id} on {self.device}" + (f", control {self.control}" if self.control else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case.to_json(),
            "device": self.device,
            "workload": self.workload,
            "threads": self.threads,
            "control": self.control,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ArmSpec:
        case = dict(data["case"])
        for name in ("questions", "checkpoint_formats"):
            case[name] = tuple(case[name])
        return cls(Case(**case), data["device"], data["workload"], data["threads"], data["control"])
