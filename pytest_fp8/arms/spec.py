"""What an arm's process is told to become: one plain value that travels as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pytest_fp8.case import Case


@dataclass(frozen=True)
class ArmSpec:
    """A case as one arm runs it."""

    case: Case
    device: str
    """``cuda`` or ``cpu``. An arm that cannot have it fails; it never falls back to the other."""
    workload: str | None = None
    """The user's workload as shipped text; ``None`` for a model of the zoo."""
    threads: int | None = None
    """CPU threads; ``None`` leaves torch's own choice."""
    control: str | None = None
    """The control that breaks this arm on purpose; ``None`` for a healthy arm."""

    @property
    def name(self) -> str:
        return f"{self.case.id} on {self.device}" + (f", control {self.control}" if self.control else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ArmSpec:
        """Raises ``ValueError`` where a key is missing or unknown."""
        _require_keys(cls, data)
        case = dict(data["case"])
        _require_keys(Case, case)
        for name in ("lora_targets", "questions", "checkpoint_formats"):
            case[name] = tuple(case[name])
        return cls(**{**data, "case": Case(**case)})


def _require_keys(record: type[ArmSpec | Case], data: Mapping[str, Any]) -> None:
    wanted = {field.name for field in fields(record)}
    missing, unknown = sorted(wanted - data.keys()), sorted(data.keys() - wanted)
    if missing or unknown:
        raise ValueError(f"{record.__name__}: missing keys {missing}, unknown keys {unknown}")
