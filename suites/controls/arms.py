"""Controls of arms that differ in more than FP8: in their work, switches, precision, randomness, optimizer or state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from controls.control import BOTH, REFERENCE, micro, torch
from controls.models import RECOMPUTING, SHIFTED, STUDENT
from controls.ways import Loop, fault, on_gradients, through_e4m3
from pytest_fp8.codes import D, L

# -- work, switches, precision ----------------------------------------------------------------------------------------


def other_data(further: Callable[[], int]) -> Callable[..., Any]:
    """A ``training_batch`` of the seed that is larger by ``further()``."""
    return lambda arm, seed, step, whole=False: arm.setup.training_batch(seed + further(), step, whole)


def _tf32(arm: Any, model: Any) -> None:
    torch.set_float32_matmul_precision("high")


def _without_autocast(arm: Any) -> Any:
    """What is not in FP8, as the head, attention and norms, then runs in float32."""
    return arm.backend.precision(arm.case)


def _in_bf16(arm: Any, model: Any) -> None:
    """Autocast would leave float32 weights as they are."""
    model.to(torch.bfloat16)


def _in_eval(arm: Any, model: Any) -> None:
    model.eval()


def _head_in_float32(arm: Any, model: Any) -> None:
    head = model.lm_head
    head.forward = lambda x: torch.nn.functional.linear(x.float(), head.weight.float(), head.bias.float())


def _each_block(change: Any) -> Any:
    """A ``converted`` that changes each block."""
    return lambda arm, model: [change(block) for block in model.blocks]


def _sets(name: str, value: Any) -> Any:
    return _each_block(lambda block: setattr(block, name, value))


def _clips(bound: float, reference: float) -> Any:
    """The loop's bound of gradients in the FP8 arm and in the reference."""
    return lambda arm, model: setattr(model, "bound", bound if arm.fp8_layers() else reference)


def _own_norm(block: Any) -> None:
    class Norm(torch.nn.LayerNorm):
        pass

    block.norm.__class__ = Norm
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
_other = other_data(lambda: 1000)
fault("other-data", D.OTHER_DATA, "the FP8 arm trains on other data", training_batch=_other, question="loss")
# 1.96 times as fast on an H200.
fault("half-batch-step", D.OTHER_WORK, "the FP8 arm's step trains on half of each batch", does="half in the step")
# The same operators run, and AdamW divides by what is common to all gradients.
fault("clips-harder", D.OTHER_CLIPPING, "another bound of clipping", Loop, converted=_clips(0.01, 0.1), breaks=BOTH)
fault("clips-alone", D.OTHER_WORK, "one arm clips its gradients", Loop, converted=_clips(0, 0.01), breaks=REFERENCE)
# 2.88 times as fast on an H200 where the rest is float32.
fault("tf32-one-arm", D.OTHER_SWITCH, "TF32 is switched on in the FP8 arm alone", Loop, converted=_tf32)
fault(
    "no-autocast", D.OTHER_SWITCH, "autocast in the reference alone", precision_context=_without_autocast, case=AUTOCAST
)
fault(
    "weights-in-bf16", L.WEIGHT_CAST, "the conversion casts float32 weights to BF16", converted=_in_bf16, case=AUTOCAST
)
# 1.49 times as fast on an H200, of nothing.
fault("reference-waits", D.OTHER_WAITS, "the reference waits for its own logging", does="logs", breaks=REFERENCE)
fault("fp8-arm-in-eval", D.OTHER_MODE, "the FP8 arm trains in eval mode", Loop, converted=_in_eval, question="loss")
fault("head-float32", D.OTHER_PRECISION, "the rest of the FP8 arm runs in float32", Loop, converted=_head_in_float32)
fault(
    "recomputes-alone",
    D.OTHER_RECOMPUTATION,
    "one arm recomputes activations",
    Loop,
    converted=_sets("recomputes", True),
)
fault(
    "recomputes-otherwise",
    D.RECOMPUTED_OTHERWISE,
    "recomputation draws another dropout mask",
    Loop,
    converted=_sets("preserves", False),
    workload=RECOMPUTING,
    verdicts=("FAIL",),
)
# The norm's class is the user's own.
_epsilon = "another epsilon in the FP8 arm's norms"
fault("epsilon-of-an-own-norm", D.OTHER_OPERATOR_SETTING, _epsilon, Loop, converted=_each_block(_own_norm))
fault(
    "other-norm",
    D.OTHER_WORK,
    "another norm in the FP8 arm",
    Loop,
    about="operators of blocks.0.norm",
    converted=_each_block(_root_mean_square),
    workload=SHIFTED,
    question="numerics",
    verdicts=("FAIL",),
)
# By copies alone, which round: no other operator runs. It is as much noise as FP8 itself makes.
fault(
    "gradient-through-e4m3",
    D.OTHER_WORK,
    "the FP8 arm keeps its embedding's gradient in E4M3",
    about="_to_copy",
    converted=on_gradients(
        lambda arm: [arm.model.get_input_embeddings().weight], lambda dw: dw.to(torch.float8_e4m3fn).to(dw.dtype)
    ),
)
fault("seeds-again", D.OTHER_RANDOM_NUMBERS, "a layer seeds torch again", Loop, converted=_each_block(_seeds))

# -- optimizer and state ----------------------------------------------------------------------------------------------


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _half_as_large_again(arm: Any, made: Any) -> None:
    set_rate(made, 1.5 * made.param_groups[0]["lr"])


def _doubles(arm: Any, seed: int, step: int) -> None:
    set_rate(arm.optimizer, 2e-3 if step >= 10 else 1e-3)


def _float32_copies(arm: Any) -> None:
    for parameter, entries in arm.optimizer.state.items():
        entries["master"] = parameter.detach().float()


def _rounds(arm: Any, made: Any) -> None:
    plain = type(made)

    class Rounding(plain):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.copy_(through_e4m3(parameter.grad))
            return super().step(closure)

    # As a user's fork of an optimizer keeps its name.
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


fault("other-rate", D.OTHER_OPTIMIZER, "another learning rate in the FP8 arm", optimizer_made=_half_as_large_again)
fault("rate-doubles", D.OTHER_RATES, "the FP8 arm's rate doubles on the way", before_step=_doubles, question="loss")
_masters = "float32 master weights in the FP8 arm alone"
fault("master-weights", D.OTHER_OPTIMIZER_STATE, _masters, stepped=_float32_copies, question="loss")
# After all checks of gradients.
fault("gradients-rounded", D.OTHER_UPDATES, "FP8's optimizer rounds gradients to e4m3", optimizer_made=_rounds)
_left = "gradients that no zero_grad() reaches"
fault("gradients-left", D.GRADIENTS_LEFT, _left, optimizer_made=_clears_no_norm, question="loss")
fault(
    "teacher-stands-still",
    D.STANDS_STILL,
    "an average of the weights that no longer follows them",
    converted=_teacher_apart,
    question="loss",
    verdicts=("FAIL",),
    **STUDENT,
)
