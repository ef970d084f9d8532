"""Names the layer that was given a number of rows that FP8 kernels do not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.base import ALIGNMENT
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.state.snapshot import unchanged
from pytest_fp8.worker.training.restored import Hook, followed, hooked
from pytest_fp8.zoo.batch import tensors_in

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


CHECKED = 3
"""Timing batches that the warm-up trains on."""
REFUSED = f"divisible by {ALIGNMENT}"
"""What torch says of a size that its FP8 products do not take."""


class TokenCountError(WorkloadError):
    """A converted layer was given a number of rows that no FP8 kernel takes."""

    def __init__(self, which: str, layer: str, rows: int, shape: tuple[int, ...], whence: str) -> None:
        """``shape``: of the input. ``whence``: the batch, where it is not the first, or an empty string."""
        self.layer, self.rows, self.shape, self.whence = layer, rows, shape, whence
        super().__init__(which, layer=layer, rows=rows, shape=shape, whence=whence)

    def unread(self) -> TokenCountError:
        """What is said where no loss reads the layer's output, and the layer was compiled with its backward pass."""
        return TokenCountError("rows_unread", self.layer, self.rows, self.shape, self.whence)


def require_aligned_rows(engine: Engine, failed: Exception | None) -> None:
    """Raise :class:`TokenCountError` where rows are the reason why a step of the warm-up failed. ``None``: none has run
    yet. With emulated FP8 the rows of each call are then watched from now on, since a CPU multiplies sizes that no FP8
    kernel takes."""
    for index in range(CHECKED if failed is not None else 1):
        _look_again(engine, lambda index=index: engine.timing_batch(index), failed)  # type: ignore[misc]
    if failed is None:
        RowWatch(engine).hooks()


def explain_rows(engine: Engine, failed: Exception) -> None:
    """After a step failed: raise :class:`TokenCountError` where a layer was given rows in the batch that was drawn last
    that FP8 kernels do not take. The libraries' own errors speak of the sizes of matrices."""
    drawn = engine.setup.drawn
    if drawn.shapes:
        _look_again(engine, lambda: engine.training_batch(drawn.seed, drawn.step), failed)


class RowWatch:
    """Raises where the gradient comes of what a converted layer made of a number of rows that no FP8 kernel takes.

    The weight gradient's inner size is the number of rows. A call that no backward pass reaches has no weight gradient,
    and its forward product takes any number of rows: an evaluation, the pooler of an encoder whose user wants the
    sequence.
    """

    def __init__(self, engine: Engine) -> None:
        modules = dict(engine.model.named_modules())
        self._modules = {name: modules[name] for name in engine.conversion.converted}
        self._engine = engine
        self._trained: set[tuple[str, int]] = set()
        """Layers and rows of which a gradient came. The next such call raises, and the error's trace has its line."""
        self.odd: dict[tuple[str, int], TokenCountError] = {}
        """The latest call of each layer with such rows."""
        self.running: list[TokenCountError | None] = []
        """The calls that run, or that ran into an error: what is wrong with their rows."""

    def hooks(self) -> list[Any]:
        """Register the hooks; gives their handles."""
        handles = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(Hook(self._before(name)), with_kwargs=True))
            handles.append(module.register_forward_hook(Hook(self._after)))
        return handles

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            given = next(tensors, None)
            rows = 0 if given is None else given.numel() // max(1, given.shape[-1])
            error = None
            if given is not None and rows % self._engine.backend.row_multiple(module):
                error = self._error(name, rows, given)
                self.odd[name, rows] = error
                if (name, rows) in self._trained and torch.is_grad_enabled():
                    raise error
            self.running.append(error)

        return before

    def _after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        error = self.running.pop()
        if error is None:
            return

        def came(gradient: torch.Tensor) -> None:
            # The backward pass comes to the last layer first; the first one with these rows is the one to name.
            first = next(each for each in self.odd.values() if each.rows == error.rows)
            self._trained.add((first.layer, first.rows))
            raise first

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(came)

    def _error(self, name: str, rows: int, given: torch.Tensor) -> TokenCountError:
        drawn = self._engine.setup.drawn
        later = drawn.shapes != self._engine.setup.first.shapes
        which, whence = ("rows_later", f" from {drawn}") if later else ("rows", "")
        return TokenCountError(which, name, rows, tuple(given.shape), whence)


def _look_again(engine: Engine, draw: Callable[[], Any], failed: Exception | None) -> None:
    """Run the step again, uncompiled and without its effect, and raise what rows explain of its failure."""
    if not engine.conversion.converted:
        return
    watch = RowWatch(engine)
    for again in (False, True):
        watch.odd.clear()
        watch.running.clear()
        try:
            handles = [*followed(engine.model.get_submodule(name) for name in engine.conversion.converted)]
            with hooked([*handles, *watch.hooks()]), torch.compiler.set_stance("force_eager"), unchanged(engine):
                engine.step(draw())
        except TokenCountError:
            if again:
                raise
        except Exception as error:
            # The libraries refuse some rows in the forward pass.
            if watch.running and watch.running[-1] is not None:
                raise watch.running[-1] from error
            return  # the step's own error is the one to show
        else:
            if watch.odd and REFUSED in str(failed):
                raise next(iter(watch.odd.values())).unread() from failed
            return
