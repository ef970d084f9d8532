"""Controls of the speedup: arms that differ in more than FP8, and a reference that is held up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from controls.control import Control
from controls.models import FLOAT_HEAD
from controls.training import ONE_B
from pytest_fp8.case import Case
from pytest_fp8.codes import D, S

if TYPE_CHECKING:
    import torch


class HalfTheBatch(Control):
    """The FP8 arm's timed steps get the first half of each batch's rows."""

    number, id = 70, "half-the-batch"
    title = "the FP8 arm trains on half of each batch"
    question = "faster"
    code = S.LESS_WORK
    about = "another sequence length, mask or batch in the FP8 arm"
    case = ONE_B
    verdicts = ("INVALID",)

    def timing_batch(self, step: int) -> Any:
        return {name: rows[: len(rows) // 2] for name, rows in super().timing_batch(step).items()}


class Tf32Alone(Control):
    """The FP8 arm allows TF32 for the products that stay in float32."""

    number, id = 71, "tf32-alone"
    title = "the FP8 arm alone multiplies float32 in TF32"
    question = "faster"
    code = D.OTHER_SWITCH
    case = Case("own", "torchao", "tensorwise", name="float_head", questions=("layers", "speedup"))
    workload = FLOAT_HEAD
    verdicts = ("INVALID",)

    def build(self) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = True
        super().build()


class ReferenceReads(Control):
    """The reference reads a value from the GPU after each step and writes its log for 40 ms."""

    number, id = 72, "reference-reads"
    title = "the reference alone waits for its logging"
    question = "faster"
    code = S.REFERENCE_WAITS
    about = "the reference alone waits for the GPU in each step"
    case = ONE_B
    verdicts = ("INVALID",)
    breaks = ("bf16",)

    pause = 0.04

    def stepped(self) -> None:
        next(self.model.parameters()).view(-1)[0].item()
        time.sleep(self.pause)


class ReferenceSleeps(Control):
    """The reference's host takes longer for each step than the GPU, as a slow loader of data does."""

    number, id = 73, "reference-sleeps"
    title = "the reference alone waits for its data"
    question = "faster"
    code = S.REFERENCE_WAITS
    about = "Python takes time in the reference's step alone"
    case = ONE_B
    verdicts = ("INVALID",)
    breaks = ("bf16",)

    pause = 0.18

    def stepped(self) -> None:
        time.sleep(self.pause)


class CompiledInBlocks(Control):
    """A function of the FP8 arm's step is compiled again in every step, for an input of another length each time."""

    number, id = 74, "compiled-in-blocks"
    title = "code is compiled again inside the timed blocks"
    question = "faster"
    code = S.COMPILED_WHILE_TIMED
    case = ONE_B
    verdicts = ("INVALID",)

    def build(self) -> None:
        import torch

        self._lengths = 1
        self._function = torch.compile(_doubled, backend="eager", dynamic=False)
        super().build()

    def stepped(self) -> None:
        import torch

        # Here and not at the start: the arm sets a limit of its own when it compiles its model.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1_000_000
        self._lengths += 1
        self._function(torch.ones(self._lengths))


def _doubled(values: torch.Tensor) -> torch.Tensor:
    return 2 * values


class NoOptimizerStep(Control):
    """The FP8 arm's optimizer does nothing when it is asked to step."""

    number, id = 75, "no-optimizer-step"
    title = "the FP8 arm's optimizer does not step"
    question = "faster"
    code = S.LESS_WORK
    about = "the FP8 arm's optimizer does not step"
    case = ONE_B
    verdicts = ("INVALID",)

    def make_optimizer(self) -> torch.optim.Optimizer:
        made = super().make_optimizer()
        made.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
        return made
