"""Controls of what a curve shows beside its losses: rates, optimizer state, gradients left over, what moves by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controls.control import Control, micro
from pytest_fp8.case import Case
from pytest_fp8.codes import D
from pytest_fp8.workload import Workload

if TYPE_CHECKING:
    import torch


class RateDoubles(Control):
    """From step 11 of each curve on, the FP8 arm trains at twice the learning rate."""

    number, id = 84, "rate-doubles"
    nightly = True
    title = "the FP8 arm's learning rate doubles on the way"
    question = "loss"
    code = D.OTHER_RATES
    case = micro()
    verdicts = ("INVALID",)

    def before_step(self, seed: int, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-3 if step >= 10 else 1e-3


class MasterWeights(Control):
    """The FP8 arm's optimizer keeps a float32 copy of each weight, and the reference's does not."""

    number, id = 85, "master-weights"
    nightly = True
    title = "float32 master weights in the FP8 arm alone"
    question = "loss"
    code = D.OTHER_OPTIMIZER_STATE
    case = micro()
    verdicts = ("INVALID",)

    def stepped(self) -> None:
        for parameter, entries in self.optimizer.state.items():
            entries["master"] = parameter.detach().float()


class GradientsLeft(Control):
    """Gradients of the norms are never cleared in the FP8 arm, so that those of all steps add up."""

    number, id = 86, "gradients-left"
    nightly = True
    title = "gradients that no zero_grad() reaches"
    question = "loss"
    code = D.GRADIENTS_LEFT
    case = micro()
    verdicts = ("INVALID",)

    def build(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}
        super().build()

    def before_step(self, seed: int, step: int) -> None:
        norms = {p for name, p in self.model.named_parameters() if "norm" in name}
        if step == 0:
            self._kept = {}
            for norm in norms:
                norm.register_post_accumulate_grad_hook(self._keep)
        for norm, gradient in self._kept.items():
            norm.grad = gradient.clone()

    def stepped(self) -> None:
        for norm, gradient in self._kept.items():
            norm.grad = gradient.clone()

    def _keep(self, norm: torch.Tensor) -> None:
        assert norm.grad is not None
        self._kept[norm] = norm.grad.detach().clone()


def build_student() -> torch.nn.Module:
    """A student, and a teacher that follows it."""
    from torch import nn

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
            self.teacher = nn.Linear(64, 64).requires_grad_(False)
            self.pairs = [(self.student[2].bias, self.teacher.bias)]

        def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.student(rows), self.teacher(rows)

    return Pair()


def rows(step: int) -> torch.Tensor:
    """128 random rows."""
    import torch

    return torch.randn(128, 64)


def follow(model: Any, batch: torch.Tensor, optimizer: torch.optim.Optimizer, precision: Any) -> torch.Tensor:
    """One step; afterwards the teacher follows the student."""
    import torch

    with precision():
        mine, teachers = model(batch)
        loss = (mine - batch.sin()).float().square().mean() + 0.1 * (mine - teachers).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for student, teacher in model.pairs:
            teacher.lerp_(student, 0.1)
    ended: torch.Tensor = loss.detach()
    return ended


class TeacherStandsStill(Control):
    """After the conversion the teacher's update holds tensors that are no part of the model any more."""

    number, id = 87, "teacher-stands-still"
    title = "an average of the weights that no longer follows them"
    question = "loss"
    code = D.STANDS_STILL
    case = Case("own", "torchao", "tensorwise", name="teacher", emulated=True, steps=20)
    workload = Workload(build=build_student, batch=rows, step=follow, leave=("teacher",), learning_rate=2e-3)

    def converted(self, model: Any) -> None:
        model.pairs = [(student, teacher.detach().clone()) for student, teacher in model.pairs]
