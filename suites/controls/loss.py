"""Controls of the loss question: FP8 that ends on the way, bad values, weights that stand still, losses of another
quantity, curves that do not begin anew, and a reference from which nothing can be learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controls.arms import set_rate
from controls.control import BOTH, Control, control, micro, torch
from controls.models import LONG
from controls.ways import fault, on_gradients, plain, weights
from pytest_fp8.codes import C

if TYPE_CHECKING:
    from torch import Tensor

# -- FP8 on the way ---------------------------------------------------------------------------------------------------


def _off_from(step: int) -> Any:
    """A ``forward`` in the precision of its input from this step of each curve on."""
    return lambda arm, layer, own, x: plain(layer, x) if arm.now >= step else own(x)


def _casts_off(arm: Any, seed: int, step: int) -> None:
    """As a plan for sensitive steps has it."""
    from torchao.float8.config import CastConfig, ScalingType

    off = CastConfig(scaling_type=ScalingType.DISABLED)
    for layer in arm.fp8_layers():
        own = layer.__dict__.setdefault("_own_config", layer.config)
        casts = [name for name in vars(own) if name.startswith("cast_config")]
        layer.config = replace(own, **dict.fromkeys(casts, off)) if step % 3 else own


def _loses_a_tile(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
    """A quarter of the output stays zero, as in a race."""
    output, arm.calls = own(x), getattr(arm, "calls", 0) + 1
    if arm.calls % 41:
        return output
    written = torch.ones_like(output)
    written[..., : output.shape[-2] // 2, : output.shape[-1] // 2] = 0
    return output * written


def _cut_at_the_first(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
    """A scale that is delayed and not renewed: later values are cut at what was largest in the first five steps."""
    if arm.now >= 5:
        return own(x.clamp(-layer.largest, layer.largest))
    now = x.detach().abs().amax()
    layer.largest = torch.maximum(now, layer.largest) if arm.now else now
    return own(x)


# The layers are FP8 layers by name.
fault("fp8-off", C.BIT_EQUAL, "FP8 is off, both curves bit-equal", forward=_off_from(0))
fault("off-after-ten-steps", C.FP8_LOST, "FP8 is off after ten steps of a run", about="step 10", forward=_off_from(10))
fault("casts-left-out", C.TOO_EXACT, "torchao without casts in two of three steps", before_step=_casts_off)
fault("rare-tile", C.RARE_PRODUCT, "one call in 41 loses a tile of its output", forward=_loses_a_tile)
fault("scale-stays", C.HIGHER, "scales stay as in the first steps, over 300 steps", forward=_cut_at_the_first, **LONG)

# -- what is trained --------------------------------------------------------------------------------------------------


def _poison(seed: int, step: int) -> Any:
    """One NaN in the first layer's weight, as a store out of bounds leaves it, before this step of this seed."""

    def before_step(arm: Any, *now: int) -> None:
        if now == (seed, step):
            with torch.no_grad():
                arm.fp8_layers()[0].weight.view(-1)[0] = float("nan")

    return before_step


def _again(arm: Any, seed: int, step: int) -> None:
    """From step 4 on and with an optimizer of its own: the arms' optimizers step equally often."""
    if step == 0:
        arm.second = torch.optim.AdamW(arm.model.parameters(), lr=1e-3)
    if step >= 3:
        arm.loss_of(arm.model, arm.setup.training_batch(seed, step)).backward()
        arm.second.step()
        arm.second.zero_grad(set_to_none=True)


_nan = micro(steps=42, seeds=1)
fault("nan-step-40", C.NOT_FINITE, "NaN at step 39", about="from step 39", before_step=_poison(0, 39), case=_nan)
# Gradients below a share of their tensor's largest become zero, as under a stale scale in E5M2.
fault(
    "loss-drift",
    C.HIGHER,
    "the loss ends 3 % higher",
    converted=on_gradients(weights, lambda dw: dw.masked_fill(dw.abs() < 0.45 * dw.abs().max(), 0.0)),
)
# All others train, and the losses lie within the margin.
fault(
    "one-weight-frozen",
    C.WEIGHTS_STAND_STILL,
    "one layer's weight gets no gradient",
    about="1 of 21 weights",
    converted=on_gradients(lambda arm: weights(arm)[-1:], lambda dw: 0 * dw),
)
_twice = "the FP8 arm trains each batch twice"
fault("trains-twice", C.LOWER, _twice, before_step=_again, verdicts=("INCONCLUSIVE",))
# 3 % of them can move.
fault(
    "rate-too-small",
    C.SMALL_STEPS,
    "a learning rate that moves no bfloat16 weight",
    optimizer_made=lambda arm, made: set_rate(made, 2e-6),
    breaks=BOTH,
    verdicts=("NOT_EXERCISED",),
)

# -- curves that do not begin anew ------------------------------------------------------------------------------------

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
