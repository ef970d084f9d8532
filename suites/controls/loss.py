"""Controls of the loss question: FP8 that ends on the way, bad values, weights that stand still, losses of another
quantity, curves that do not begin anew, and a reference from which nothing can be learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controls.arms import set_rate
from controls.control import BOTH, GITHUB, TORCHAO, Control, control, fault, micro
from controls.lazily import torch
from controls.models import LONG, SISTER
from controls.ways import Forwards, Optimizers, on_gradients, plain
from pytest_fp8.codes import C

if TYPE_CHECKING:
    from torch import Tensor

# The layers are FP8 layers by name.
fault(
    "fp8-off",
    "FP8 is off, both curves bit-equal",
    C.BIT_EQUAL,
    Forwards,
    forward=lambda arm, layer, own, x: plain(layer, x),
)
# And on again in the next curve.
fault(
    "off-after-ten-steps",
    "FP8 is off after ten steps of each run",
    C.FP8_LOST,
    Forwards,
    about="step 10",
    forward=lambda arm, layer, own, x: plain(layer, x) if arm.now >= 10 else own(x),
)
# As a guard against outliers has it.
fault(
    "off-in-two-steps",
    "FP8 is off in two steps in the middle of each run",
    C.FP8_LOST,
    Forwards,
    about="in 2 of 20 steps: 3, 7",
    forward=lambda arm, layer, own, x: plain(layer, x) if arm.now in (3, 7) else own(x),
    nightly=True,
)


def _casts_off(arm: Any, seed: int, step: int) -> None:
    from torchao.float8.config import CastConfig, ScalingType

    off = CastConfig(scaling_type=ScalingType.DISABLED)
    for layer in arm.fp8_layers():
        own = layer.__dict__.setdefault("_own_config", layer.config)
        casts = [name for name in vars(own) if name.startswith("cast_config")]
        layer.config = replace(own, **dict.fromkeys(casts, off)) if step % 3 else own


# As a plan for sensitive steps has it.
fault(
    "casts-left-out",
    "torchao's own function without casts in two of three steps",
    C.TOO_EXACT,
    before_step=_casts_off,
    nightly=True,
)


@control("rare-tile", "one call in 41 loses a tile of its output", C.RARE_PRODUCT, nightly=True)
class RareTile(Forwards):
    """A quarter of the output stays zero, as in a race."""

    _calls = 0

    def forward(self, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
        output = own(x)
        self._calls += 1
        if self._calls % 41:
            return output
        written = torch.ones_like(output)
        written[..., : output.shape[-2] // 2, : output.shape[-1] // 2] = 0
        return output * written


def _poison(at: Callable[[int, int], bool]) -> Any:
    """One NaN in the first layer's weight, as a store out of bounds leaves it, before steps for which ``at(seed,
    step)`` holds."""

    def before_step(arm: Any, seed: int, step: int) -> None:
        if at(seed, step):
            with torch.no_grad():
                arm.fp8_layers()[0].weight.view(-1)[0] = float("nan")

    return before_step


fault(
    "nan-step-40",
    "NaN at step 39, finite before",
    C.NOT_FINITE,
    source=f"[torchtitan 1056]({GITHUB}/pytorch/torchtitan/issues/1056)",
    about="from step 39",
    before_step=_poison(lambda seed, step: step == 39),
    case=micro(steps=42, seeds=1),
)
fault(
    "nan-one-run-in-four",
    "NaN in one run out of four",
    C.NOT_FINITE,
    source=f"[torchao 4652]({TORCHAO}/pull/4652)",
    about="seed 2",
    before_step=_poison(lambda seed, step: (seed, step) == (2, 11)),
    case=micro(steps=14, seeds=4),
    nightly=True,
)
# Gradients below a share of their tensor's largest become zero, as under a stale scale in E5M2.
fault(
    "loss-drift",
    "the loss ends 3 % higher",
    C.HIGHER,
    source=f"[Megatron-LM 1152]({GITHUB}/NVIDIA/Megatron-LM/issues/1152)",
    converted=lambda arm, model: on_gradients(
        [layer.weight for layer in arm.fp8_layers()], lambda dw: dw.masked_fill(dw.abs() < 0.45 * dw.abs().max(), 0.0)
    ),
    nightly=True,
)
# All others train, and the losses lie within the margin.
fault(
    "one-weight-frozen",
    "one layer's weight gets no gradient",
    C.WEIGHTS_STAND_STILL,
    about="1 of 21 weights",
    converted=lambda arm, model: on_gradients([arm.fp8_layers()[-1].weight], lambda dw: 0 * dw),
)


@control(
    "nothing-learns",
    "an arm in which no weight moves",
    C.WEIGHTS_STAND_STILL,
    about="an optimizer that steps other copies",
    nightly=True,
)
class NothingLearns(Control):
    """After each step a callback puts the weights of the curve's start back."""

    def build(self) -> None:
        self._start: list[Tensor] = []
        super().build()

    def before_step(self, seed: int, step: int) -> None:
        if step == 0:
            self._start = [parameter.detach().clone() for parameter in self.model.parameters()]

    def stepped(self) -> None:
        for parameter, value in zip(self.model.parameters(), self._start, strict=False):
            parameter.data.copy_(value)


def _again(arm: Any, seed: int, step: int) -> None:
    if step == 0:
        arm.second = torch.optim.AdamW(arm.model.parameters(), lr=1e-3)
    if step >= 3:
        arm.loss_of(arm.model, arm.setup.training_batch(seed, step)).backward()
        arm.second.step()
        arm.second.zero_grad(set_to_none=True)


# From step 4 on and with an optimizer of its own: the arms' optimizers step equally often.
fault(
    "trains-twice",
    "the FP8 arm trains each batch twice",
    C.LOWER,
    before_step=_again,
    verdicts=("INCONCLUSIVE",),
    nightly=True,
)
# 3 % of them can move.
fault(
    "rate-too-small",
    "a learning rate that moves no bfloat16 weight",
    C.SMALL_STEPS,
    Optimizers,
    source="[8B at rate 5e-6](measurements.md#eight-billion-parameters-do-not-learn-in-a-minute)",
    optimizer_made=lambda arm, made: set_rate(made, 2e-6),
    breaks=BOTH,
    verdicts=("NOT_EXERCISED",),
    nightly=True,
)


@control(
    "moments-carry-on",
    "a curve begins with the moments of the last one",
    C.NOT_ANEW,
    about="it keeps something from one curve for the next",
    breaks=BOTH,
    verdicts=("INVALID",),
    nightly=True,
)
class MomentsCarryOn(Control):
    """As where a step has an average of its own."""

    def build(self) -> None:
        self._kept: dict[Tensor, dict[str, Any]] = {}
        super().build()

    def before_step(self, seed: int, step: int) -> None:
        if step == 0:
            self.optimizer.state.update(self._kept)

    def stepped(self) -> None:
        self._kept = {weight: dict(entries) for weight, entries in self.optimizer.state.items()}


@control(
    "batches-carry-on",
    "batches of an iterator that goes on",
    C.NOT_ANEW,
    about="goes on where the last curve left it",
    breaks=BOTH,
    verdicts=("INVALID",),
)
class BatchesCarryOn(Control):
    _drawn = 0

    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        self._drawn += 1
        return super().training_batch(0, self._drawn, whole)


# -- what begins after the usual 20 to 40 steps: a look of 300 ---------------------------------------------------------

LATE: dict[str, Any] = {"case": LONG, "workload": SISTER, "nightly": True}
BEGINS = 60
"""The step from which these are wrong."""

fault(
    "nan-after-80",
    "NaN from step 80 on",
    C.NOT_FINITE,
    source=f"[torchtitan 1056]({GITHUB}/pytorch/torchtitan/issues/1056)",
    about="from step 80",
    before_step=_poison(lambda seed, step: step == 80),
    **LATE,
)


@control("scale-stays", "the scales of inputs stay as they were in the first steps", C.HIGHER, **LATE)
class ScaleStays(Forwards):
    """A scale that is delayed and not renewed: later values are cut at what was largest in the first five steps."""

    def build(self) -> None:
        self._largest: dict[Any, Tensor] = {}
        super().build()

    def forward(self, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
        if self.now >= 5:
            return own(x.clamp(-self._largest[layer], self._largest[layer]))
        now = x.detach().abs().amax()
        self._largest[layer] = torch.maximum(now, self._largest.get(layer, now)) if self.now else now
        return own(x)


@control("cache-renewed-rarely", "copies of the weights are renewed every 50 steps", C.HIGHER, **LATE)
class CacheRenewedRarely(Forwards):
    def build(self) -> None:
        self._kept: dict[Any, Tensor] = {}
        super().build()

    def forward(self, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
        weight = layer.weight
        if self.now < BEGINS or self.now % 50 == 0:
            self._kept[layer] = weight.detach().clone()
        # The gradient goes to the weight.
        layer._parameters["weight"] = self._kept[layer] + weight - weight.detach()
        try:
            return own(x)
        finally:
            layer._parameters["weight"] = weight


fault(
    "off-after-sixty-steps",
    "FP8 is off after sixty steps of each run",
    C.FP8_LOST,
    Forwards,
    about="step 60",
    forward=lambda arm, layer, own, x: plain(layer, x) if arm.now >= BEGINS else own(x),
    **LATE,
)
