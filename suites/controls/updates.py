"""Controls of what the arms do besides their products: the optimizer's own rule, seeds, modes that a save leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from controls.control import Control, micro
from controls.ledger import ChangedBeside
from controls.own_checkpoints import CASE, SAVED, save
from pytest_fp8.codes import D, K

if TYPE_CHECKING:
    import torch


class GradientsRounded(Control):
    """The FP8 arm's optimizer rounds each gradient to scaled e4m3 inside its step, after all checks of gradients."""

    number, id = 100, "gradients-rounded"
    title = "the FP8 arm's optimizer rounds its gradients to e4m3"
    question = "layers"
    code = D.OTHER_UPDATES
    about = "the optimizer's own rule differs"
    case = micro()
    verdicts: ClassVar[tuple[str, ...]] = ("INVALID",)

    def make_optimizer(self) -> torch.optim.Optimizer:
        made = super().make_optimizer()
        plain = type(made)

        class Rounding(plain):  # type: ignore[misc, valid-type]
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.copy_(_through_e4m3(parameter.grad))
                return super().step(closure)

        # As a user's fork of an optimizer keeps its name.
        Rounding.__qualname__ = plain.__qualname__
        made.__class__ = Rounding
        return made


def _through_e4m3(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    scale = 448 / tensor.abs().max().float().clamp(min=1e-12)
    return (tensor.float() * scale).to(torch.float8_e4m3fn).float() / scale


class SeededInEachStep(ChangedBeside):
    """A hook of the conversion seeds torch before each forward pass, so that each step has the same dropout mask."""

    number, id = 101, "seeded-in-each-step"
    nightly = True
    title = "the FP8 arm draws the same dropout mask in each step"
    code = D.OTHER_RANDOM_NUMBERS
    about = "the arms draw other random numbers in the same step"

    def converted(self, model: Any) -> None:
        import torch

        def seed(module: Any, given: Any) -> None:
            torch.manual_seed(0)

        model.register_forward_pre_hook(seed)


class SaveLeavesEval(Control):
    """The user's ``save()`` puts the FP8 model into eval mode and leaves it there."""

    number, id = 102, "save-leaves-eval"
    title = "own save() leaves the model in eval mode"
    question = "checkpoints"
    code = K.STATE_LEFT_BEHIND
    case, workload = CASE, SAVED

    def build(self) -> None:
        self.setup.own = replace(SAVED, save=_save_in_eval)
        super().build()


def _save_in_eval(model: Any, optimizer: Any, folder: Any) -> None:
    model.eval()
    save(model, optimizer, folder)
