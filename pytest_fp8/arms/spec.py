"""What an arm's process is told to become: one record that travels as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_fp8.case import Case

STORE = "PYTEST_FP8_STORE"
"""The variable that names the file through which an arm's ranks meet: a port may be another's by then."""


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
    """Import path (``module:Class``) of the control that breaks this arm on purpose; ``None`` for a healthy arm."""
    leave: tuple[str, ...] = ()
    """Patterns of Linears that stay in high precision, beside the workload's own."""
    first_step: str = ""
    """The hash of the first step, where an earlier process of this arm has run it; see ``worker/as_built.py``."""

    @property
    def name(self) -> str:
        return f"{self.case.id} on {self.device}" + (f", control {self.control}" if self.control else "")
