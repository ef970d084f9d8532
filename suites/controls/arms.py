"""Controls of arms that differ in more than FP8: in their work, switches, precision, randomness, optimizer or state;
and of what is trained: bad values, weights that stand still, curves that do not begin anew."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from controls.control import BOTH, REFERENCE, control, micro, torch
from controls.models import RECOMPUTING, SHIFTED, STUDENT
from controls.ways import Loop, in_e4m3, on_gradients, weights
from pytest_fp8.codes import C, D, L

# -- work, switches, precision ----------------------------------------------------------------------------------------


def _each_block(change: Callable[[Any], Any]) -> Any:
    """A ``converted`` that changes each block."""
    return lambda arm, model: [change(block) for block in model.blocks]


def _head_in_float32(arm: Any, model: Any) -> None:
    head = model.lm_head
    head.forward = lambda x: torch.nn.functional.linear(x.float(), head.weight.float(), head.bias.float())


def _own_norm(block: Any) -> None:
    """A class of the user's own."""
    block.norm.__class__ = type("Norm", (torch.nn.LayerNorm,), {})
    block.norm.eps = 0.02


def _root_mean_square(block: Any) -> None:
    """It does not subtract the mean."""
    from torch.nn.functional import rms_norm

    norm = block.norm
    norm.forward = lambda x: 3 * rms_norm(x, norm.normalized_shape, norm.weight) + norm.bias


def _seeds(block: Any) -> None:
    """Dropout masks repeat."""
    block.up.register_forward_pre_hook(lambda *call: torch.manual_seed(3) and None)


AUTOCAST = micro(autocast=True)
FAILS: dict[str, Any] = {"verdicts": ("FAIL",)}
control("other-data", D.OTHER_DATA, "the FP8 arm trains on other data")(
    draws=lambda arm, seed, step: (seed + 1000, step), question="loss"
)
# 1.96 times as fast on an H200.
control("half-batch-step", D.OTHER_WORK, "the FP8 arm's step trains on half of each batch")(settings={"rows": 64})
# The same operators run, and AdamW divides by what is common to all gradients.
control("clips-harder", D.OTHER_CLIPPING, "another bound of clipping")(
    Loop, converted=lambda arm, model: setattr(model.settings, "bound", 0.01 if arm.fp8_layers() else 0.1), breaks=BOTH
)
control("clips-alone", D.OTHER_WORK, "one arm clips its gradients")(settings={"bound": 0.01}, breaks=REFERENCE)
# 2.88 times as fast on an H200 where the rest is float32.
control("tf32-one-arm", D.OTHER_SWITCH, "TF32 is switched on in the FP8 arm alone")(
    Loop, converted=lambda *_: torch.set_float32_matmul_precision("high")
)
# What is not in FP8, as the head, attention and norms, then runs in float32.
control("no-autocast", D.OTHER_SWITCH, "autocast in the reference alone")(
    precision_context=lambda arm: arm.backend.precision(arm.case), case=AUTOCAST
)
# Autocast would leave float32 weights as they are.
control("weights-in-bf16", L.WEIGHT_CAST, "the conversion casts float32 weights to BF16")(
    converted=lambda arm, model: model.bfloat16(), case=AUTOCAST
)
# 1.49 times as fast on an H200, of nothing.
control("reference-waits", D.OTHER_WAITS, "the reference waits for its own logging")(
    settings={"logs": True}, breaks=REFERENCE
)
control("fp8-arm-in-eval", D.OTHER_MODE, "the FP8 arm trains in eval mode")(
    Loop, converted=lambda arm, model: model.eval(), question="loss"
)
control("head-float32", D.OTHER_PRECISION, "the rest of the FP8 arm runs in float32")(Loop, converted=_head_in_float32)
control("recomputes-alone", D.OTHER_RECOMPUTATION, "one arm recomputes activations")(settings={"recomputes": True})
control("recomputes-otherwise", D.RECOMPUTED_OTHERWISE, "recomputation draws another dropout mask")(
    settings={"preserves": False}, workload=RECOMPUTING, **FAILS
)
control("epsilon-of-an-own-norm", D.OTHER_OPERATOR_SETTING, "another epsilon in the FP8 arm's norms")(
    Loop, converted=_each_block(_own_norm)
)
control("other-norm", D.OTHER_WORK, "another norm in the FP8 arm")(
    Loop,
    about="operators of blocks.0.norm",
    converted=_each_block(_root_mean_square),
    workload=SHIFTED,
    question="numerics",
    **FAILS,
)
# By copies alone, which round: no other operator runs. It is as much noise as FP8 itself makes.
control("gradient-through-e4m3", D.OTHER_WORK, "the FP8 arm keeps its embedding's gradient in E4M3")(
    about="_to_copy", converted=on_gradients(lambda arm: [arm.model.get_input_embeddings().weight], in_e4m3)
)
control("seeds-again", D.OTHER_RANDOM_NUMBERS, "a layer seeds torch again")(Loop, converted=_each_block(_seeds))

# -- optimizer and state ----------------------------------------------------------------------------------------------


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _float32_copies(arm: Any) -> None:
    for parameter, entries in arm.optimizer.state.items():
        entries["master"] = parameter.detach().float()


def _rounds(arm: Any, made: Any) -> None:
    """To scaled E4M3. As a user's fork of an optimizer keeps its name."""
    plain = type(made)

    class Rounding(plain):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            for gradient in (each.grad for group in self.param_groups for each in group["params"]):
                if gradient is not None:
                    scale = 448 / gradient.abs().max().float().clamp(min=1e-12)
                    gradient.copy_((gradient.float() * scale).to(torch.float8_e4m3fn).float() / scale)
            return super().step(closure)

    Rounding.__qualname__ = plain.__qualname__
    made.__class__ = Rounding


def _clears_no_norm(arm: Any, made: Any) -> None:
    """Gradients of the norms are never cleared, so that those of all steps add up."""
    own, norms = made.zero_grad, [weight for name, weight in arm.model.named_parameters() if "norm" in name]

    def zero_grad(set_to_none: bool = True) -> None:
        kept = [norm.grad for norm in norms]
        own(set_to_none)
        for norm, gradient in zip(norms, kept, strict=True):
            norm.grad = gradient

    made.zero_grad = zero_grad


def _teacher_apart(arm: Any, model: Any) -> None:
    """The teacher's update holds tensors that are no part of the converted model any more."""
    model.pairs = [(student, teacher.detach().clone()) for student, teacher in model.pairs]


control("other-rate", D.OTHER_OPTIMIZER, "another learning rate in the FP8 arm")(
    optimizer_made=lambda arm, made: set_rate(made, 1.5 * made.param_groups[0]["lr"])
)
control("rate-doubles", D.OTHER_RATES, "the FP8 arm's rate doubles on the way")(
    before_step=lambda arm, seed, step: set_rate(arm.optimizer, 2e-3 if step >= 10 else 1e-3), question="loss"
)
control("eval-on-the-way", D.OTHER_MODE, "the FP8 arm stays in eval mode from its sixth step on")(
    before_step=lambda arm, seed, step: arm.model.train(step < 5), question="loss"
)
control("master-weights", D.OTHER_OPTIMIZER_STATE, "float32 master weights in the FP8 arm alone")(
    stepped=_float32_copies, question="loss"
)
# After all checks of gradients.
control("gradients-rounded", D.OTHER_UPDATES, "FP8's optimizer rounds gradients to e4m3")(optimizer_made=_rounds)
control("gradients-left", D.GRADIENTS_LEFT, "gradients that no zero_grad() reaches")(
    optimizer_made=_clears_no_norm, question="loss"
)
control("teacher-stands-still", D.STANDS_STILL, "an average of the weights that no longer follows them")(
    converted=_teacher_apart, question="loss", **STUDENT, **FAILS
)

# -- what is trained --------------------------------------------------------------------------------------------------


def _poison(arm: Any, *now: int) -> None:
    """One NaN in the first layer's weight, as a store out of bounds leaves it, before step 39 of the first seed."""
    if now == (0, 39):
        with torch.no_grad():
            arm.fp8_layers()[0].weight.view(-1)[0] = float("nan")


def _again(arm: Any, seed: int, step: int) -> None:
    """From step 4 on and with an optimizer of its own: the arms' optimizers step equally often."""
    if step == 0:
        arm.second = torch.optim.AdamW(arm.model.parameters(), lr=1e-3)
    if step >= 3:
        arm.loss_of(arm.model, arm.setup.training_batch(seed, step)).backward()
        arm.second.step()
        arm.second.zero_grad(set_to_none=True)


control("nan-step-40", C.NOT_FINITE, "NaN at step 39")(
    about="from step 39", before_step=_poison, case=micro(steps=42, seeds=1)
)
# Gradients below a share of their tensor's largest become zero, as under a stale scale in E5M2.
control("loss-drift", C.HIGHER, "the loss ends 3 % higher")(
    converted=on_gradients(weights, lambda dw: dw.masked_fill(dw.abs() < 0.45 * dw.abs().max(), 0.0))
)
# All others train, and the losses lie within the margin.
control("one-weight-frozen", C.WEIGHTS_STAND_STILL, "one layer's weight gets no gradient")(
    about="1 of 21 weights", converted=on_gradients(lambda arm: weights(arm)[-1:], lambda dw: 0 * dw)
)
control("trains-twice", C.LOWER, "the FP8 arm trains each batch twice")(before_step=_again, verdicts=("INCONCLUSIVE",))
# 3 % of them can move.
control("rate-too-small", C.SMALL_STEPS, "a learning rate that moves no bfloat16 weight")(
    optimizer_made=lambda arm, made: set_rate(made, 2e-6), breaks=BOTH, verdicts=("NOT_EXERCISED",)
)

# -- curves that do not begin anew ------------------------------------------------------------------------------------

DRAWN = count(1)


def _puts_back(arm: Any, seed: int, step: int) -> None:
    if step == 0:
        arm.optimizer.state.update(arm.kept)


def _keeps(arm: Any) -> None:
    arm.kept = {weight: dict(entries) for weight, entries in arm.optimizer.state.items()}


NOT_ANEW: dict[str, Any] = {"breaks": BOTH, "verdicts": ("INVALID",)}
# Batches of an iterator that goes on.
control("batches-carry-on", C.NOT_ANEW)(
    about="goes on where the last curve left it", draws=lambda arm, seed, step: (0, next(DRAWN)), **NOT_ANEW
)
# A curve begins with the moments of the last one, as where a step has an average of its own.
control("moments-carry-on", C.NOT_ANEW)(
    about="it keeps something from one curve for the next", before_step=_puts_back, stepped=_keeps, kept={}, **NOT_ANEW
)
