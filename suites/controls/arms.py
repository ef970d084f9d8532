"""Controls of arms that differ in more than FP8: in their work, switches, precision, randomness, optimizer or state."""

from __future__ import annotations

from typing import Any

from controls.control import BOTH, micro, torch
from controls.models import RECOMPUTING, SHIFTED, STUDENT
from controls.ways import Loop, fault, on_gradients, through_e4m3
from pytest_fp8.codes import D, L

REFERENCE = ("bf16",)
UNDER_AUTOCAST = micro(autocast=True)

# -- work, switches, precision ----------------------------------------------------------------------------------------

fault(
    "other-data",
    D.OTHER_DATA,
    "the FP8 arm trains on other data",
    training_batch=lambda arm, seed, step, whole=False: arm.setup.training_batch(seed + 1000, step, whole),
    question="loss",
)
# 1.96 times as fast on an H200.
fault("half-batch-step", D.OTHER_WORK, "the FP8 arm's step trains on half of each batch", does="half in the step")
# The same operators run, and the same parameters move: AdamW divides by what they have in common.
fault(
    "clips-harder",
    D.OTHER_CLIPPING,
    "the FP8 arm clips its gradients to a tenth of the reference's bound",
    Loop,
    converted=lambda arm, model: setattr(model, "bound", 0.01 if arm.fp8_layers() else 0.1),
    breaks=BOTH,
    question="loss",
)
fault(
    "clips-alone",
    D.OTHER_WORK,
    "one arm clips its gradients",
    Loop,
    converted=lambda arm, model: setattr(model, "bound", 0.01),
    breaks=REFERENCE,
    question="loss",
)
# 2.88 times as fast on an H200 where the rest is float32.
fault(
    "tf32-one-arm",
    D.OTHER_SWITCH,
    "TF32 is switched on in the FP8 arm alone",
    Loop,
    converted=lambda arm, model: torch.set_float32_matmul_precision("high"),
)
# What is not in FP8, as the head, attention and norms, then runs in float32.
fault(
    "no-autocast",
    D.OTHER_SWITCH,
    "the FP8 arm's forward pass runs without the autocast that the reference has",
    precision_context=lambda arm: arm.backend.precision(arm.case),
    case=UNDER_AUTOCAST,
)
fault(
    "weights-in-bf16",
    L.WEIGHT_CAST,
    "the conversion casts float32 weights to bfloat16, which autocast would leave alone",
    converted=lambda arm, model: model.to(torch.bfloat16),
    case=UNDER_AUTOCAST,
)
# 1.49 times as fast on an H200, of nothing.
fault("reference-waits", D.OTHER_WAITS, "the reference waits for its own logging", does="logs", breaks=REFERENCE)
fault(
    "fp8-arm-in-eval",
    D.OTHER_MODE,
    "the FP8 arm trains in eval mode",
    Loop,
    converted=lambda arm, model: model.eval(),
    question="loss",
)


def _head_in_float32(arm: Any, model: Any) -> None:
    head = model.lm_head
    head.forward = lambda x: torch.nn.functional.linear(x.float(), head.weight.float(), head.bias.float())


def _each_block(change: Any) -> Any:
    """A ``converted`` that changes each block."""
    return lambda arm, model: [change(block) for block in model.blocks]


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


fault("head-float32", D.OTHER_PRECISION, "the rest of the FP8 arm runs in float32", Loop, converted=_head_in_float32)
fault(
    "recomputes-alone",
    D.OTHER_RECOMPUTATION,
    "one arm recomputes its activations",
    Loop,
    converted=_each_block(lambda block: setattr(block, "recomputes", True)),
)
# Both arms recompute; the FP8 arm does so with other random numbers.
fault(
    "recomputes-otherwise",
    D.RECOMPUTED_OTHERWISE,
    "recomputation draws another dropout mask",
    Loop,
    converted=_each_block(lambda block: setattr(block, "preserves", False)),
    workload=RECOMPUTING,
    verdicts=("FAIL",),
)
# The norm's class is the user's own.
fault(
    "epsilon-of-an-own-norm",
    D.OTHER_OPERATOR_SETTING,
    "another epsilon in the FP8 arm's norms",
    Loop,
    converted=_each_block(_own_norm),
)
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
    converted=lambda arm, model: on_gradients(
        [model.get_input_embeddings().weight], lambda given: given.to(torch.float8_e4m3fn).to(given.dtype)
    ),
)


def _seeds(block: Any) -> None:
    """Dropout masks repeat."""

    def again(*call: Any) -> None:
        torch.manual_seed(3)

    block.up.register_forward_pre_hook(again)


fault(
    "seeds-again",
    D.OTHER_RANDOM_NUMBERS,
    "a layer of the FP8 arm seeds the generator again",
    Loop,
    converted=_each_block(_seeds),
)

# -- optimizer and state ----------------------------------------------------------------------------------------------


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


fault(
    "other-rate",
    D.OTHER_OPTIMIZER,
    "the FP8 arm trains at another learning rate",
    optimizer_made=lambda arm, made: set_rate(made, 1.5 * made.param_groups[0]["lr"]),
    case=micro(steps=3, seeds=1),
    question="loss",
)
fault(
    "rate-doubles",
    D.OTHER_RATES,
    "the FP8 arm's learning rate doubles on the way",
    before_step=lambda arm, seed, step: set_rate(arm.optimizer, 2e-3 if step >= 10 else 1e-3),
    question="loss",
)


def _float32_copies(arm: Any) -> None:
    for parameter, entries in arm.optimizer.state.items():
        entries["master"] = parameter.detach().float()


fault(
    "master-weights",
    D.OTHER_OPTIMIZER_STATE,
    "float32 master weights in the FP8 arm alone",
    stepped=_float32_copies,
    question="loss",
)


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


# After all checks of gradients.
fault(
    "gradients-rounded",
    D.OTHER_UPDATES,
    "the FP8 arm's optimizer rounds its gradients to e4m3",
    optimizer_made=_rounds,
)


def _clears_no_norm(arm: Any, made: Any) -> None:
    """Gradients of the norms are never cleared, so that those of all steps add up."""
    own, norms = made.zero_grad, [weight for name, weight in arm.model.named_parameters() if "norm" in name]

    def zero_grad(set_to_none: bool = True) -> None:
        kept = [norm.grad for norm in norms]
        own(set_to_none)
        for norm, gradient in zip(norms, kept, strict=True):
            norm.grad = gradient

    made.zero_grad = zero_grad


fault(
    "gradients-left",
    D.GRADIENTS_LEFT,
    "gradients that no zero_grad() reaches",
    optimizer_made=_clears_no_norm,
    question="loss",
)


def _teacher_apart(arm: Any, model: Any) -> None:
    """The teacher's update holds tensors that are no part of the converted model any more."""
    model.pairs = [(student, teacher.detach().clone()) for student, teacher in model.pairs]


fault(
    "teacher-stands-still",
    D.STANDS_STILL,
    "an average of the weights that no longer follows them",
    converted=_teacher_apart,
    question="loss",
    verdicts=("FAIL",),
    **STUDENT,
)
