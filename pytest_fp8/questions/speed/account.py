"""The account of a speedup: where both arms' steps go, what products in FP8 earned, and the limit they set. Pure.

A step is busy or idle. Busy time is split into matrix products by role and type, attention, the optimizer,
communication and all other kernels. In compiled code the casts of FP8 are fused into norms and activations, so that
they have no kernels of their own: what all other kernels take longer than in BF16 is their cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from pytest_fp8.plain import to_plain
from pytest_fp8.questions.layers.evidence import KernelTime, LayersEvidence
from pytest_fp8.questions.layers.products import EVALUATION, Product
from pytest_fp8.questions.speed.coverage import covered_by_fp8, role_times
from pytest_fp8.questions.speed.wire import ArmWire, wire_words

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
class GpuStep:
    """What the GPU did in one arm's step, as it was profiled. Empty where no step was."""

    milliseconds: Mapping[str, float] = field(default_factory=dict)
    """``LayersEvidence.milliseconds``: by class of kernel, and ``busy``."""
    products: Sequence[Product] = ()
    roles: Mapping[str, float] = field(default_factory=dict)
    """``<role> <type>`` -> milliseconds of its products."""
    step_ms: Sequence[float] = ()
    """Of several steps in a row, with kernels alone profiled."""
    busy_ms: Sequence[float] = ()
    """Of these steps: time in which the GPU ran any kernel, of several GPUs without waits for a late host."""
    compute_ms: Sequence[float] = ()
    """Of these steps: time in which it ran any kernel but collectives."""
    asked: Sequence[float] = ()
    """Busy times that were asked after the timed blocks, where they tell more than the profile."""
    wire: ArmWire = field(default_factory=ArmWire)
    rest: Sequence[KernelTime] = ()
    waits: Mapping[str, int] = field(default_factory=dict)
    """CUDA call by which the host waited for the GPU -> how often in the step."""

    def idle(self, step: float) -> float:
        """Milliseconds in which the GPU waits, of a timed step of that many.

        What :attr:`asked` leaves of it; without that, the least of two estimates: the clocks of the profiled steps may
        differ from those of the timed ones, and to profile kernels takes some of the host's time.
        """
        if self.asked:
            return max(0.0, step - median(self.asked))
        busy = median(self.busy_ms) if self.busy_ms else self.milliseconds["busy"]
        profiled = [max(0.0, a - b) for a, b in zip(self.step_ms, self.busy_ms, strict=True)]
        return min([max(0.0, step - busy), *([median(profiled)] if profiled else [])])

    def computes(self, busy: float) -> float:
        """Milliseconds in which other kernels than collectives run, of a timed step that is busy for so many.

        On one GPU all of it. A collective also runs while it waits for another rank, and ranks wait most in the one
        step whose operators are profiled: what nothing hides of it is no measure of a timed step.
        """
        if not self.wire.rows:
            return busy
        steps = [alone / all_ for alone, all_ in zip(self.compute_ms, self.busy_ms, strict=True) if all_]
        return busy * (median(steps) if steps else self.profiled / self.milliseconds["busy"])

    @property
    def profiled(self) -> float:
        """The same of the step whose operators were profiled."""
        return self.milliseconds["busy"] - self.wire.exposed


def gpu_step(evidence: LayersEvidence) -> GpuStep:
    """The profiled step in what an arm said of its layers."""
    products = [product for product in evidence.products if product.phase != EVALUATION]
    return GpuStep(
        milliseconds=evidence.milliseconds,
        products=products,
        roles=role_times(products, evidence.calls),
        step_ms=evidence.step_ms,
        busy_ms=evidence.busy_ms,
        compute_ms=evidence.compute_ms,
        wire=ArmWire(evidence.wire, evidence.exposed_ms),
        rest=evidence.rest,
        waits=evidence.waits,
    )


@dataclass(frozen=True)
class ArmAccount:
    """Milliseconds of one arm's timed step: ``step`` = ``busy`` + ``idle``."""

    step: float
    busy: float
    idle: float
    classes: Mapping[str, float]
    """Busy time by class: ``fp8 products``, ``other products``, ``attention``, ``optimizer``, ``communication``,
    ``rest``. The shares are those of the profiled step, but for what nothing hides of collectives."""
    roles: Mapping[str, float]
    """The products' part by role and type."""
    waits: Mapping[str, int]
    slow_step: float
    """The step of the slower blocks: three in four are not slower."""
    wire: ArmWire
    scale: float = 1.0
    """Timed over profiled time of kernels that are no collectives."""
    rest: Sequence[KernelTime] = ()
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

    def reached(self, on_busy: bool = False) -> float | None:
        """(speedup - 1) / (limit - 1); ``None`` where products earned less than 1 % of the step. Of busy time, where
        that is judged or an arm waits for its host."""
        on_busy = on_busy or bool(launch_bound_arms(self))
        speedup, limit = (self.busy_speedup, self.busy_limit) if on_busy else (self.speedup, self.limit)
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
        on_busy = on_busy or bool(launch_bound_arms(self))
        reached = self.reached(on_busy)
        of_it = f", {reached:.0%} of it reached" if reached is not None else ""
        limit = f"{self.busy_limit:.2f}x of busy time" if on_busy else f"{self.limit:.2f}x"
        return (
            f"products in FP8 earned {self.earned:.1f} ms, casts and other kernels {self.casts:+.1f} ms, all else "
            f"{self.all_else:+.1f} ms; limit {limit}{of_it}; "
            f"idle {self.bf16.idle_share:.1%} in BF16, {self.fp8.idle_share:.1%} in FP8"
            f"{wire_words(self.bf16.wire, self.fp8.wire)}"
        )


def account_of(bf16: GpuStep, fp8: GpuStep, bf16_ms: Sequence[float], fp8_ms: Sequence[float]) -> Account | None:
    """The account of two steps. ``bf16_ms``, ``fp8_ms``: milliseconds per step of every block. ``None`` where an arm
    was not profiled."""
    if not bf16.milliseconds.get("busy") or not fp8.milliseconds.get("busy"):
        return None
    slow, fast = _arm(bf16, bf16_ms), _arm(fp8, fp8_ms)
    before, after = covered_by_fp8(bf16.products, fp8.products)
    flops = [sum(product.flops for product in arm.products) for arm in (bf16, fp8)]
    lost = max(0.0, 1 - flops[1] / flops[0]) if flops[0] else 0.0
    products = sum(slow.classes.get(name, 0.0) for name in ("fp8 products", "other products"))
    covered, in_fp8 = before * slow.scale, after * fast.scale
    uncovered = max(0.0, products - covered)
    grown = fast.classes.get("rest", 0.0) - slow.classes.get("rest", 0.0)
    missing = uncovered - fast.classes.get("other products", 0.0)
    return Account(
        slow,
        fast,
        covered,
        in_fp8,
        uncovered,
        lost,
        hidden_gain(missing, grown - CASTS * in_fp8) if lost > LOST else 0.0,
    )


def launch_bound_arms(account: Account | None) -> list[str]:
    """The arms whose step waits for the host."""
    if account is None:
        return []
    return [name for name, arm in (("BF16", account.bf16), ("FP8", account.fp8)) if arm.launch_bound]


def hidden_gain(missing: float, grown: float) -> float:
    """Milliseconds that products may have earned which a library runs through kernels that no profile tells from
    others: ``missing`` are their times in the reference, ``grown`` what other kernels take longer in the FP8 arm than
    casts explain. They cannot be faster than the peak rates allow, so that at least ``missing / PEAKS`` must have come
    back."""
    return max(0.0, missing * (1 - 1 / PEAKS)) if grown >= missing / PEAKS else 0.0


def _arm(step: GpuStep, blocks: Sequence[float]) -> ArmAccount:
    timed, slow = median(blocks), sorted(blocks)[3 * len(blocks) // 4]
    idle = step.idle(timed)
    busy = timed - idle
    computes = step.computes(busy)
    scale = computes / step.profiled if step.profiled > 0 else 1.0
    classes = {name: value * scale for name, value in step.milliseconds.items() if name != "busy"}
    wire = step.wire.scaled(scale, exposed=busy - computes)
    if wire.rows:
        classes["communication"] = wire.milliseconds
    roles = {name: value * scale for name, value in step.roles.items()}
    rest = [replace(kernel, milliseconds=kernel.milliseconds * scale) for kernel in step.rest]
    return ArmAccount(timed, busy, idle, classes, roles, step.waits, slow, wire, scale, rest)


def _ratio(before: float, after: float) -> float:
    """At most a hundred: a report in JSON has no infinity."""
    return before / max(after, before / 100) if before else 1.0
