"""Controls of arms that differ in more than FP8: in their work, switches, precision, randomness, optimizer or state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controls.control import Control, control, fault, micro
from controls.lazily import torch
from controls.models import BIASED, RECOMPUTING, SHIFTED, STUDENT, WIDE, WIDE_CASE
from controls.ways import Loop, Optimizers, on_gradients, through_e4m3
from pytest_fp8.codes import D, L

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE = ("bf16",)
SHORT = micro(steps=3, seeds=1)
UNDER_AUTOCAST = micro(autocast=True)

# -- work, switches, precision ----------------------------------------------------------------------------------------

# The FP8 arm draws its batches from another seed.
fault(
    "other-data",
    "the FP8 arm trains on other data",
    D.OTHER_DATA,
    training_batch=lambda arm, seed, step, whole=False: arm.setup.training_batch(seed + 1000, step, whole),
    question="loss",
)
# 1.96 times as fast on an H200.
fault("half-batch-step", "the FP8 arm's step trains on half of each batch", D.OTHER_WORK, Loop, does="half in the step")
# The same batch enters both arms.
fault(
    "half-batch-forward",
    "the converted model drops half of its rows",
    D.OTHER_WORK,
    Loop,
    does="half in the forward pass",
    question="loss",
    nightly=True,
)
fault(
    "micro-batches",
    "the arms split a batch into other micro-batches",
    D.OTHER_WORK,
    Loop,
    does="four micro-batches",
    breaks=REFERENCE,
    nightly=True,
)
fault(
    "clips-alone",
    "one arm clips its gradients",
    D.OTHER_WORK,
    Loop,
    does="clips",
    breaks=REFERENCE,
    question="loss",
    nightly=True,
)
# 2.88 times as fast on an H200 where the rest is float32.
fault(
    "tf32-one-arm",
    "TF32 is switched on in the FP8 arm alone",
    D.OTHER_SWITCH,
    Loop,
    converted=lambda arm, model: torch.set_float32_matmul_precision("high"),
)
# What is not in FP8, as the head, attention and norms, then runs in float32.
fault(
    "no-autocast",
    "the FP8 arm's forward pass runs without the autocast that the reference has",
    D.OTHER_SWITCH,
    precision_context=lambda arm: arm.backend.precision(arm.case),
    case=UNDER_AUTOCAST,
)
fault(
    "weights-in-bf16",
    "the conversion casts float32 weights to bfloat16, which autocast would leave alone",
    L.WEIGHT_CAST,
    converted=lambda arm, model: model.to(torch.bfloat16),
    case=UNDER_AUTOCAST,
)
# 1.49 times as fast on an H200, of nothing.
fault("reference-waits", "the reference waits for its own logging", D.OTHER_WAITS, Loop, does="logs", breaks=REFERENCE)


def _each_block(name: str, value: Any, part: str = "") -> Any:
    """A ``converted`` that sets an attribute of each block, or of a part of it."""

    def converted(arm: Any, model: Any) -> None:
        for block in model.blocks:
            setattr(getattr(block, part) if part else block, name, value)

    return converted


fault(
    "dropout-off",
    "dropout is off in the FP8 arm alone",
    D.OTHER_WORK,
    Loop,
    converted=_each_block("p", 0.0, "drop"),
    question="loss",
    nightly=True,
)
fault(
    "fp8-arm-in-eval",
    "the FP8 arm trains in eval mode",
    D.OTHER_MODE,
    Loop,
    converted=lambda arm, model: model.eval(),
    question="loss",
)


def _head_in_float32(arm: Any, model: Any) -> None:
    head = model.lm_head
    head.forward = lambda x: torch.nn.functional.linear(x.float(), head.weight.float(), head.bias.float())


fault("head-float32", "the rest of the FP8 arm runs in float32", D.OTHER_PRECISION, Loop, converted=_head_in_float32)
fault(
    "recomputes-alone",
    "one arm recomputes its activations",
    D.OTHER_RECOMPUTATION,
    Loop,
    converted=_each_block("recomputes", True),
)
# Both arms recompute; the FP8 arm does so with other random numbers.
fault(
    "recomputes-otherwise",
    "recomputation draws another dropout mask",
    D.RECOMPUTED_OTHERWISE,
    Loop,
    converted=_each_block("preserves", False),
    workload=RECOMPUTING,
    verdicts=("FAIL",),
)


def _own_norm(arm: Any, model: Any) -> None:
    class Norm(torch.nn.LayerNorm):
        pass

    for block in model.blocks:
        block.norm.__class__ = Norm
        block.norm.eps = 0.02


# The norm's class is the user's own.
fault(
    "epsilon-of-an-own-norm",
    "another epsilon in the FP8 arm's norms",
    D.OTHER_OPERATOR_SETTING,
    Loop,
    converted=_own_norm,
)
fault(
    "other-approximation",
    "another approximation of the GELU in the FP8 arm",
    D.OTHER_OPERATOR_SETTING,
    about="operators of 1",
    converted=lambda arm, model: setattr(model[1], "approximate", "tanh"),
    case=WIDE_CASE,
    workload=WIDE,
    nightly=True,
)


def _root_mean_square(arm: Any, model: Any) -> None:
    from torch.nn.functional import rms_norm

    for block in model.blocks:
        norm = block.norm
        norm.forward = lambda x, norm=norm: 3 * rms_norm(x, norm.normalized_shape, norm.weight) + norm.bias


# It does not subtract the mean.
fault(
    "other-norm",
    "another norm in the FP8 arm",
    D.OTHER_WORK,
    Loop,
    about="operators of blocks.0.norm",
    converted=_root_mean_square,
    workload=SHIFTED,
    question="numerics",
    verdicts=("FAIL",),
    nightly=True,
)

# By copies alone, which round: no other operator runs. It is as much noise as FP8 itself makes.
fault(
    "gradient-through-e4m3",
    "the FP8 arm keeps its embedding's gradient in E4M3",
    D.OTHER_WORK,
    converted=lambda arm, model: on_gradients(
        [model.get_input_embeddings().weight], lambda given: given.to(torch.float8_e4m3fn).to(given.dtype)
    ),
    about="_to_copy float8_e4m3fn",
)

# -- random numbers ---------------------------------------------------------------------------------------------------


def _seed(value: int) -> Any:
    def hook(*_: Any) -> None:
        torch.manual_seed(value)

    return hook


def _seeds_in_blocks(arm: Any, model: Any) -> None:
    for block in model.blocks:
        block.up.register_forward_pre_hook(_seed(3))


# Dropout masks repeat.
fault(
    "seeds-again",
    "a layer of the FP8 arm seeds the generator again",
    D.OTHER_RANDOM_NUMBERS,
    Loop,
    converted=_seeds_in_blocks,
)
fault(
    "seeded-in-each-step",
    "the FP8 arm draws the same dropout mask in each step",
    D.OTHER_RANDOM_NUMBERS,
    Loop,
    converted=lambda arm, model: model.register_forward_pre_hook(_seed(0)),
    nightly=True,
)

# -- optimizer and state ----------------------------------------------------------------------------------------------


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


fault(
    "other-rate",
    "the FP8 arm trains at another learning rate",
    D.OTHER_OPTIMIZER,
    Optimizers,
    optimizer_made=lambda arm, made: set_rate(made, 1.5 * made.param_groups[0]["lr"]),
    case=SHORT,
    question="loss",
)
fault(
    "rate-doubles",
    "the FP8 arm's learning rate doubles on the way",
    D.OTHER_RATES,
    before_step=lambda arm, seed, step: set_rate(arm.optimizer, 2e-3 if step >= 10 else 1e-3),
    question="loss",
    nightly=True,
)


def _float32_copies(arm: Any) -> None:
    for parameter, entries in arm.optimizer.state.items():
        entries["master"] = parameter.detach().float()


fault(
    "master-weights",
    "float32 master weights in the FP8 arm alone",
    D.OTHER_OPTIMIZER_STATE,
    stepped=_float32_copies,
    question="loss",
    nightly=True,
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
    "the FP8 arm's optimizer rounds its gradients to e4m3",
    D.OTHER_UPDATES,
    Optimizers,
    optimizer_made=_rounds,
)


def _weights_in_e4m3(arm: Any) -> None:
    for parameter in arm.model.parameters():
        if parameter.dim() > 1:
            parameter.data.copy_(through_e4m3(parameter.detach()))


# As where FP8 copies take the master weights' place.
fault(
    "weights-in-fp8",
    "the weights themselves are kept in FP8",
    D.OTHER_UPDATES,
    stepped=_weights_in_e4m3,
    question="loss",
    nightly=True,
)


@control("gradients-left", "gradients that no zero_grad() reaches", D.GRADIENTS_LEFT, question="loss", nightly=True)
class GradientsLeft(Control):
    """Gradients of the norms are never cleared, so that those of all steps add up."""

    def build(self) -> None:
        self._kept: dict[Any, Tensor] = {}
        super().build()

    def before_step(self, seed: int, step: int) -> None:
        if step == 0:
            self._kept = {}
            for norm in {p for name, p in self.model.named_parameters() if "norm" in name}:
                norm.register_post_accumulate_grad_hook(self._keep)
        self.stepped()

    def stepped(self) -> None:
        for norm, gradient in self._kept.items():
            norm.grad = gradient.clone()

    def _keep(self, norm: Tensor) -> None:
        assert norm.grad is not None
        self._kept[norm] = norm.grad.detach().clone()


def _teacher_apart(arm: Any, model: Any) -> None:
    model.pairs = [(student, teacher.detach().clone()) for student, teacher in model.pairs]


# The teacher's update holds tensors that are no part of the converted model any more.
fault(
    "teacher-stands-still",
    "an average of the weights that no longer follows them",
    D.STANDS_STILL,
    converted=_teacher_apart,
    case=BIASED,
    workload=STUDENT,
    question="loss",
    verdicts=("FAIL",),
)
