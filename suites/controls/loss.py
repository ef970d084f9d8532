"""Controls of the loss question: FP8 that ends on the way, bad values, weights that stand still, losses of another
quantity, curves that do not begin anew, and a reference from which nothing can be learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controls.arms import set_rate
from controls.control import BOTH, GITHUB, TORCHAO, Control, control, micro, torch
from controls.models import LONG
from controls.ways import Forwards, fault, on_gradients, plain
from pytest_fp8.codes import C

if TYPE_CHECKING:
    from torch import Tensor

# The layers are FP8 layers by name.
fault(
    "fp8-off",
    C.BIT_EQUAL,
    "FP8 is off, both curves bit-equal",
    forward=lambda arm, layer, own, x: plain(layer, x),
)
# And on again in the next curve.
fault(
    "off-after-ten-steps",
    C.FP8_LOST,
    "FP8 is off after ten steps of each run",
    about="step 10",
    forward=lambda arm, layer, own, x: plain(layer, x) if arm.now >= 10 else own(x),
)


def _casts_off(arm: Any, seed: int, step: int) -> None:
    """As a plan for sensitive steps has it."""
    from torchao.float8.config import CastConfig, ScalingType

    off = CastConfig(scaling_type=ScalingType.DISABLED)
    for layer in arm.fp8_layers():
        own = layer.__dict__.setdefault("_own_config", layer.config)
        casts = [name for name in vars(own) if name.startswith("cast_config")]
        layer.config = replace(own, **dict.fromkeys(casts, off)) if step % 3 else own


fault(
    "casts-left-out",
    C.TOO_EXACT,
    "torchao's own function without casts in two of three steps",
    before_step=_casts_off,
)


def _loses_a_tile(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
    """A quarter of the output stays zero, as in a race."""
    output, arm.calls = own(x), getattr(arm, "calls", 0) + 1
    if arm.calls % 41:
        return output
    written = torch.ones_like(output)
    written[..., : output.shape[-2] // 2, : output.shape[-1] // 2] = 0
    return output * written


fault("rare-tile", C.RARE_PRODUCT, "one call in 41 loses a tile of its output", forward=_loses_a_tile)


def _poison(at: tuple[int, int]) -> Any:
    """One NaN in the first layer's weight, as a store out of bounds leaves it, before this step of this seed."""

    def before_step(arm: Any, seed: int, step: int) -> None:
        if (seed, step) == at:
            with torch.no_grad():
                arm.fp8_layers()[0].weight.view(-1)[0] = float("nan")

    return before_step


fault(
    "nan-step-40",
    C.NOT_FINITE,
    "NaN at step 39, finite before",
    source=f"[torchtitan 1056]({GITHUB}/pytorch/torchtitan/issues/1056)",
    about="from step 39",
    before_step=_poison((0, 39)),
    case=micro(steps=42, seeds=1),
)
fault(
    "nan-one-run-in-four",
    C.NOT_FINITE,
    "NaN in one run out of four",
    source=f"[torchao 4652]({TORCHAO}/pull/4652)",
    about="seed 2",
    before_step=_poison((2, 11)),
    case=micro(steps=14, seeds=4),
)
# Gradients below a share of their tensor's largest become zero, as under a stale scale in E5M2.
fault(
    "loss-drift",
    C.HIGHER,
    "the loss ends 3 % higher",
    source=f"[Megatron-LM 1152]({GITHUB}/NVIDIA/Megatron-LM/issues/1152)",
    converted=lambda arm, model: on_gradients(
        [layer.weight for layer in arm.fp8_layers()], lambda dw: dw.masked_fill(dw.abs() < 0.45 * dw.abs().max(), 0.0)
    ),
)


@control(
    "scale-stays", C.HIGHER, "the scales of inputs stay as they were in the first steps: a look of 300 steps", **LONG
)
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


# All others train, and the losses lie within the margin.
fault(
    "one-weight-frozen",
    C.WEIGHTS_STAND_STILL,
    "one layer's weight gets no gradient",
    about="1 of 21 weights",
    converted=lambda arm, model: on_gradients([arm.fp8_layers()[-1].weight], lambda dw: 0 * dw),
)


def _again(arm: Any, seed: int, step: int) -> None:
    """From step 4 on and with an optimizer of its own: the arms' optimizers step equally often."""
    if step == 0:
        arm.second = torch.optim.AdamW(arm.model.parameters(), lr=1e-3)
    if step >= 3:
        arm.loss_of(arm.model, arm.setup.training_batch(seed, step)).backward()
        arm.second.step()
        arm.second.zero_grad(set_to_none=True)


fault(
    "trains-twice",
    C.LOWER,
    "the FP8 arm trains each batch twice",
    before_step=_again,
    verdicts=("INCONCLUSIVE",),
)
# 3 % of them can move.
fault(
    "rate-too-small",
    C.SMALL_STEPS,
    "a learning rate that moves no bfloat16 weight",
    source="[8B at rate 5e-6](measurements.md#eight-billion-parameters-do-not-learn-in-a-minute)",
    optimizer_made=lambda arm, made: set_rate(made, 2e-6),
    breaks=BOTH,
    verdicts=("NOT_EXERCISED",),
)
NOT_ANEW: dict[str, Any] = {"breaks": BOTH, "verdicts": ("INVALID",)}


@control("batches-carry-on", C.NOT_ANEW, about="goes on where the last curve left it", **NOT_ANEW)
class BatchesCarryOn(Control):
    """Batches of an iterator that goes on."""

    _drawn = 0

    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        self._drawn += 1
        return super().training_batch(0, self._drawn, whole)


@control("moments-carry-on", C.NOT_ANEW, about="it keeps something from one curve for the next", **NOT_ANEW)
class MomentsCarryOn(Control):
    """A curve begins with the moments of the last one, as where a step has an average of its own."""

    def build(self) -> None:
        self._kept: dict[Tensor, dict[str, Any]] = {}
        super().build()

    def before_step(self, seed: int, step: int) -> None:
        if step == 0:
            self.optimizer.state.update(self._kept)

    def stepped(self) -> None:
        self._kept = {weight: dict(entries) for weight, entries in self.optimizer.state.items()}
