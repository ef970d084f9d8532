"""What travels between the ranks, in the account of a speedup: its time, and how much of it nothing hides. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_fp8.questions.layers.evidence import WireTime


@dataclass(frozen=True)
class ArmWire:
    """The collectives of one arm's timed step. Empty on one GPU."""

    rows: Sequence[WireTime] = ()
    exposed: float = 0.0
    """Milliseconds in which collectives ran and no other kernel did."""

    def scaled(self, factor: float, exposed: float) -> ArmWire:
        """The same with so much of it not hidden, and what is hidden scaled."""
        hidden = (self.milliseconds - self.exposed) * factor
        each = (hidden + exposed) / self.milliseconds if self.milliseconds else factor
        return ArmWire([replace(row, milliseconds=row.milliseconds * each) for row in self.rows], exposed)

    @property
    def milliseconds(self) -> float:
        return sum(row.milliseconds for row in self.rows)

    @property
    def elements(self) -> int | None:
        """Numbers that travelled; ``None`` where the profile does not say it of every collective."""
        return sum(row.elements for row in self.rows) if all(row.elements for row in self.rows) else None

    def words(self) -> str:
        """``all-gather 39.5 and reduce-scatter 27.0 ms, 12.1 ms of it not hidden``; empty where nothing travelled."""
        if not self.rows:
            return ""
        spent: dict[str, float] = {}
        for row in self.rows:
            spent[row.operation] = spent.get(row.operation, 0.0) + row.milliseconds
        kinds = " and ".join(f"{kind} {time:.1f}" for kind, time in spent.items())
        return f"{kinds} ms, {self.exposed:.1f} ms of it not hidden"


def wire_words(bf16: ArmWire, fp8: ArmWire) -> str:
    """Both arms' wires in one line's end; empty where nothing travelled."""
    said = [f"{wire.words()} in {arm}" for arm, wire in (("BF16", bf16), ("FP8", fp8)) if wire.rows]
    return f"; on the wire {'; '.join(said)}" if said else ""


def slow_wire(bf16: ArmWire, fp8: ArmWire, noticed: float) -> str:
    """How FP8 is slow where collectives that nothing hides hold it up for ``noticed`` milliseconds more than BF16."""
    if fp8.exposed - bf16.exposed < noticed:
        return ""
    longer = fp8.milliseconds - bf16.milliseconds
    what = "have less to hide behind, since products are faster"
    if longer >= noticed:
        what = f"take {longer:.1f} ms longer than BF16's"
    return f"the wire: the FP8 arm's collectives {what}; {fp8.words()}, in BF16 {bf16.words() or 'none'}"


def sends_less(bf16: ArmWire, fp8: ArmWire, share: float) -> bool:
    """Whether so large a share of the reference's numbers is missing on the FP8 arm's wire; true where profiles do not
    count them. Fewer bytes are no less work: FP8 weights that are gathered have half of BF16's."""
    before, now = bf16.elements, fp8.elements
    return before is None or now is None or now < (1 - share) * before
