"""What the host's processors did while an arm was timed, and whether that held it up."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Host:
    """Seconds, as in :class:`pytest_fp8.worker.watch.processors.Reading`. Of several ranks the worst one's."""

    wall: float = 0.0
    """In which blocks were taken, and the steps before them that do not count."""
    used: float = 0.0
    stolen: float = 0.0
    waited: float = 0.0

    def __add__(self, more: Host) -> Host:
        return Host(
            *(mine + other for mine, other in zip(self.numbers().values(), more.numbers().values(), strict=True))
        )

    def numbers(self) -> dict[str, float]:
        return asdict(self)

    @property
    def stolen_share(self) -> float:
        """Of the processor time that all processes of the machine asked for."""
        return self.stolen / (self.used + self.stolen) if self.stolen > 0 else 0.0

    @property
    def waited_share(self) -> float:
        """Of the time that passed. Above 1 where several threads waited at once."""
        return self.waited / self.wall if self.wall > 0 else 0.0
