"""The account of a speedup: where both arms' steps go, what products in FP8 earned, and the limit they set. Pure.

A step is busy or idle. Busy time is split into matrix products by type, attention, the optimizer,
communication and all other kernels. In compiled code the casts of FP8 are fused into norms and activations, so that
they have no kernels of their own: what all other kernels take longer than in BF16 is their cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pytest_fp8.plain import to_plain
from pytest_fp8.questions.layers.evidence import KernelTime, LayersEvidence, WireTime
from pytest_fp8.questions.layers.products import EVALUATION, FP8, Extents, Product

IDLE = 0.10
"""A step that idles for a larger share waits for the host: it is launch-bound. In ten steps recorded on H200s, compiled
arms idle 4 to 7 %, of which the clocks of the profiled step explain some, and arms that wait 25 %, 52 % and 94 %."""
CLOCKS = 0.05
"""By how much the clocks may make busy times differ that were taken beside a step's: as hosts of one kind do."""
LOST = 0.02
"""Share of the reference's FLOPs that the FP8 arm may lack: recomputation may end one product earlier."""
CASTS = 0.5
"""What casts and scales cost at most, as a share of the time of the products in FP8: 0.36 to 0.47 of it in four pairs
of compiled steps recorded on H200s."""
PEAKS = 2.0
"""FP8 over BF16 in the peak rates of every GPU with FP8: no product gains more."""


@dataclass(frozen=True)
class ArmWire:
    """The collectives of one arm's timed step. Empty on one GPU."""

    rows: Sequence[WireTime] = ()
    exposed: float = 0.0
    """Milliseconds in which collectives ran and no other kernel did."""

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
        spent: dict[str, float] = defaultdict(float)
        for row in self.rows:
            spent[row.operation] += row.milliseconds
        kinds = " and ".join(f"{kind} {time:.1f}" for kind, time in spent.items())
        return f"{kinds} ms, {self.exposed:.1f} ms of it not hidden"


@dataclass(frozen=True)
class ArmAccount:
    """Milliseconds of one arm's timed step: ``step`` = ``busy`` + ``idle``."""

    step: float
    busy: float
    idle: float
    classes: Mapping[str, float]
    """Busy time by class: ``fp8 products``, ``other products``, ``attention``, ``optimizer``, ``communication``,
    ``rest``. The shares are those of the profiled step, but for what nothing hides of collectives."""
    waits: Mapping[str, int]
    """CUDA call by which the host waited for the GPU -> how often in the step."""
    slow_step: float
    """The step of the slower blocks: three in four are not slower."""
    wire: ArmWire
    scale: float
    """Timed over profiled time of kernels that are no collectives."""
    rest: Sequence[KernelTime]
    """The longest kernels of the class ``rest``."""

    @property
    def idle_share(self) -> float:
        return self.idle / self.step if self.step else 0.0

    @property
    def launch_bound(self) -> bool:
        """Whether the step waits for its host for more than ``IDLE`` of its time, in a quarter of the blocks at least.

        A host that is busy now and then does not move the median: with Transformer Engine at 1B on an H200, blocks of
        one process took 98 to 142 ms, and the GPU worked 96 ms in each. On quiet hosts the slower blocks of 30
        recordings lie at most 3.4 % above the median."""
        return self.slow_step - self.busy > IDLE * self.slow_step


@dataclass(frozen=True)
class Account:
    """Both arms' steps, and what FP8 explains of their difference. Milliseconds of the timed steps."""

    bf16: ArmAccount
    fp8: ArmAccount
    covered: float
    """What the products that run in FP8 take in the reference."""
    in_fp8: float
    """What the same products take in FP8."""
    uncovered: float
    """What the reference's other products take."""
    lost_flops: float
    """Share of the reference's product FLOPs that the FP8 arm did not multiply."""
    hidden: float
    """What products may have earned that no profile shows in the FP8 arm: see :func:`hidden_gain`."""

    @property
    def earned(self) -> float:
        """Milliseconds that products saved by running in FP8."""
        return self.covered - self.in_fp8

    @property
    def casts(self) -> float:
        """Milliseconds that kernels take longer which are no product, no attention and no optimizer."""
        return self.difference("rest")

    def grown(self) -> list[KernelTime]:
        """The kernels of the rest that take longer in the FP8 arm: by how many milliseconds, the most first. Compiled
        code has other names where casts are fused into it: all of such a kernel counts."""
        before = {kernel.name: kernel.milliseconds for kernel in self.bf16.rest}
        longer = [replace(k, milliseconds=k.milliseconds - before.get(k.name, 0.0)) for k in self.fp8.rest]
        return sorted((k for k in longer if k.milliseconds > 0), key=lambda kernel: -kernel.milliseconds)

    @property
    def all_else(self) -> float:
        """FP8 less BF16 in all that is neither earned by products nor the casts' cost."""
        return self.fp8.step - self.bf16.step + self.earned - self.casts

    @property
    def limit(self) -> float:
        """The speedup of a step in which nothing changed but the products that run in FP8:
        1 / (1 - f (1 - 1/r)), with f their share of the reference's step and r their own speedup."""
        return _ratio(self.bf16.step, self.bf16.step - self.earned - self.hidden)

    @property
    def busy_limit(self) -> float:
        """The same of the step's busy time."""
        return _ratio(self.bf16.busy, self.bf16.busy - self.earned - self.hidden)

    @property
    def speedup(self) -> float:
        return _ratio(self.bf16.step, self.fp8.step)

    @property
    def busy_speedup(self) -> float:
        return _ratio(self.bf16.busy, self.fp8.busy)

    @property
    def launch_bound(self) -> list[str]:
        """The arms whose step waits for the host."""
        return [name for name, arm in (("BF16", self.bf16), ("FP8", self.fp8)) if arm.launch_bound]

    def reached(self, on_busy: bool = False) -> float | None:
        """(speedup - 1) / (limit - 1); ``None`` where products earned less than 1 % of the step. Of busy time, where
        that is judged or an arm waits for its host."""
        speedup, limit = self.speedup, self.limit
        if on_busy or self.launch_bound:
            speedup, limit = self.busy_speedup, self.busy_limit
        return (speedup - 1) / (limit - 1) if limit > 1.01 else None

    def difference(self, name: str) -> float:
        """FP8 less BF16 in one class of kernels. The reference's other products are those that FP8 does not cover."""
        before = self.uncovered if name == "other products" else self.bf16.classes.get(name, 0.0)
        return self.fp8.classes.get(name, 0.0) - before

    def numbers(self, on_busy: bool = False) -> dict[str, object]:
        """For the report: plain data, milliseconds and ratios. ``on_busy``: whether busy time is judged."""
        return {
            "bf16": to_plain(self.bf16),
            "fp8": to_plain(self.fp8),
            "earned_ms": self.earned,
            "casts_ms": self.casts,
            "grown": to_plain(self.grown()),
            "all_else_ms": self.all_else,
            "limit": self.limit,
            "busy_limit": self.busy_limit,
            "reached": self.reached(on_busy),
            "busy_speedup": self.busy_speedup,
        }

    def line(self, on_busy: bool = False) -> str:
        """The account in one line. ``on_busy``: whether busy time is judged."""
        reached = self.reached(on_busy)
        of_it = f", {reached:.0%} of it reached" if reached is not None else ""
        limit = f"{self.busy_limit:.2f}x of busy time" if on_busy or self.launch_bound else f"{self.limit:.2f}x"
        wires = [
            f"{arm.wire.words()} in {name}" for name, arm in (("BF16", self.bf16), ("FP8", self.fp8)) if arm.wire.rows
        ]
        return (
            f"products in FP8 earned {self.earned:.1f} ms, casts and other kernels {self.casts:+.1f} ms, all else "
            f"{self.all_else:+.1f} ms; limit {limit}{of_it}; "
            f"idle {self.bf16.idle_share:.1%} in BF16, {self.fp8.idle_share:.1%} in FP8"
            + (f"; on the wire {'; '.join(wires)}" if wires else "")
        )


def account_of(
    bf16: LayersEvidence | None,
    fp8: LayersEvidence | None,
    bf16_ms: Sequence[float],
    fp8_ms: Sequence[float],
    busy: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> Account | None:
    """The account of two steps. ``bf16_ms``, ``fp8_ms``: milliseconds per step of every block; ``busy``: busy times
    that were asked beside them. ``None`` where an arm was not profiled.

    The few profiled steps may have met a quiet host, and the timed ones a busy one: what these waited would then count
    as the GPU's work. So busy times that were asked tell how long both arms wait, where they leave more of FP8's step
    than other clocks would. Elsewhere they could hide a reference that waits.
    """
    if not (bf16 and fp8 and bf16.milliseconds.get("busy") and fp8.milliseconds.get("busy")):
        return None
    asked = [[each for each in times if each > 0] for times in busy]
    if not all(asked) or median(fp8_ms) - median(asked[1]) <= (IDLE + CLOCKS) * median(fp8_ms):
        asked = [[], []]
    slow, fast = _arm(bf16, bf16_ms, asked[0]), _arm(fp8, fp8_ms, asked[1])
    before, after = covered_by_fp8(_trained(bf16), _trained(fp8))
    flops = [sum(product.flops for product in _trained(arm)) for arm in (bf16, fp8)]
    lost = max(0.0, 1 - flops[1] / flops[0]) if flops[0] else 0.0
    products = sum(slow.classes.get(name, 0.0) for name in ("fp8 products", "other products"))
    covered, in_fp8 = before * slow.scale, after * fast.scale
    uncovered = max(0.0, products - covered)
    grown = fast.classes.get("rest", 0.0) - slow.classes.get("rest", 0.0)
    missing = uncovered - fast.classes.get("other products", 0.0)
    hidden = hidden_gain(missing, grown - CASTS * in_fp8) if lost > LOST else 0.0
    return Account(slow, fast, covered, in_fp8, uncovered, lost, hidden)


def hidden_gain(missing: float, grown: float) -> float:
    """Milliseconds that products may have earned which a library runs through kernels that no profile tells from
    others: ``missing`` are their times in the reference, ``grown`` what other kernels take longer in the FP8 arm than
    casts explain. They cannot be faster than the peak rates allow, so that at least ``missing / PEAKS`` must have come
    back."""
    return max(0.0, missing * (1 - 1 / PEAKS)) if grown >= missing / PEAKS else 0.0


def _arm(step: LayersEvidence, blocks: Sequence[float], asked: Sequence[float]) -> ArmAccount:
    timed, slow = median(blocks), sorted(blocks)[3 * len(blocks) // 4]
    profiled = step.milliseconds["busy"] - step.exposed_ms
    if asked:
        idle = max(0.0, timed - median(asked))
    else:
        # The least of two estimates: the clocks of the profiled steps may differ from those of the timed ones, and to
        # profile kernels takes some of the host's time.
        idle = max(0.0, timed - (median(step.busy_ms) if step.busy_ms else step.milliseconds["busy"]))
        if step.busy_ms:
            idle = min(idle, median(max(0.0, a - b) for a, b in zip(step.step_ms, step.busy_ms, strict=True)))
    busy = computes = timed - idle
    if step.wire:
        # A collective also runs while it waits for another rank, and ranks wait most in the one step whose operators
        # are profiled: what nothing hides of it there is no measure of a timed step.
        shares = [alone / every for alone, every in zip(step.compute_ms, step.busy_ms, strict=True) if every]
        computes = busy * (median(shares) if shares else profiled / step.milliseconds["busy"])
    scale = computes / profiled if profiled > 0 else 1.0
    classes = {name: value * scale for name, value in step.milliseconds.items() if name != "busy"}
    wire, travelled = ArmWire(), sum(row.milliseconds for row in step.wire)
    if step.wire:
        spent = (travelled - step.exposed_ms) * scale + busy - computes
        each = spent / travelled if travelled else scale
        rows = [replace(row, milliseconds=row.milliseconds * each) for row in step.wire]
        wire = ArmWire(rows, exposed=busy - computes)
        classes["communication"] = wire.milliseconds
    rest = [replace(kernel, milliseconds=kernel.milliseconds * scale) for kernel in step.rest]
    return ArmAccount(timed, busy, idle, classes, step.waits, slow, wire, scale, rest)


def _ratio(before: float, after: float) -> float:
    """At most a hundred: a report in JSON has no infinity."""
    return before / max(after, before / 100) if before else 1.0


# -- the time of products ---------------------------------------------------------------------------------------------


def _trained(step: LayersEvidence) -> list[Product]:
    return [product for product in step.products if product.phase != EVALUATION]


def covered_by_fp8(bf16: Sequence[Product], fp8: Sequence[Product]) -> tuple[float, float]:
    """Milliseconds, in the reference and in the FP8 arm, of the products that both ran and the FP8 arm ran in FP8.

    Matched by phase and extents, by their FLOPs; what a fused layer multiplies in other extents, by phase alone.
    """
    slow, fast = _pools(bf16), _pools(product for product in fp8 if product.kind == FP8)
    high = _pools(product for product in fp8 if product.kind != FP8)
    covered = in_fp8 = 0.0
    left: dict[str, tuple[_Pool, _Pool]] = defaultdict(lambda: (_Pool(), _Pool()))
    for extents in {**slow, **fast}:
        theirs, mine = slow[extents], fast[extents]
        both = min(mine.flops, theirs.flops)
        covered += theirs.share(both)
        in_fp8 += mine.share(both)
        of_phase, unmatched = left[extents[0]], max(0, theirs.flops - both - high[extents].flops)
        of_phase[0].add(unmatched, theirs.share(unmatched))
        of_phase[1].add(mine.flops - both, mine.share(mine.flops - both))
    for theirs, mine in left.values():
        both = min(mine.flops, theirs.flops)
        covered += theirs.share(both)
        in_fp8 += mine.share(both)
    return covered, in_fp8


@dataclass
class _Pool:
    """Products that count as alike."""

    flops: int = 0
    milliseconds: float = 0.0

    def add(self, flops: int, milliseconds: float) -> None:
        self.flops += flops
        self.milliseconds += milliseconds

    def share(self, flops: int) -> float:
        """Milliseconds of so many of the pool's FLOPs."""
        return self.milliseconds * flops / self.flops if self.flops else 0.0


def _pools(products: Iterable[Product]) -> dict[Extents, _Pool]:
    pools: dict[Extents, _Pool] = defaultdict(_Pool)
    for product in products:
        pools[product.extents].add(product.flops, product.milliseconds)
    return pools
