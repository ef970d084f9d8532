"""Checks that every converted layer gets a number of rows that FP8 kernels take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.base import ALIGNMENT
from pytest_fp8.codes import R
from pytest_fp8.worker.training.parallel import called
from pytest_fp8.worker.training.restored import Hook, around, hooked
from pytest_fp8.worker.watch.observe import input_of
from pytest_fp8.worker.watch.reached import Reached

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine
    from pytest_fp8.worker.training.given import Drawn


CHECKED = 3
"""Timing batches that are looked at before training: those that the warm-up trains on."""
REFUSED = f"divisible by {ALIGNMENT}"
"""What torch says of a size that its FP8 products do not take."""


class TokenCountError(ValueError):
    """A converted layer was given a number of rows that no FP8 kernel takes."""

    fp8_code = R.ROWS_OF_A_LAYER
    fp8_cause = "the weight gradient's inner size is the number of tokens, and FP8 kernels take multiples of 16"
    fp8_next = (
        "pad the batch with pytest_fp8.pad_to_multiple(batch), or choose batch x sequence length as a multiple of 16: "
        "a batch of 16 always is one, whatever a model makes of pictures or sound; for rows that a router chose: "
        "pytest_fp8.pad_to_multiple(rows) before the layer, [: len(rows)] after it; where these lines are a library's, "
        "leave its layers in BF16: Workload(leave=(names,))"
    )


class LaterBatchError(TokenCountError):
    """The first batch had a number of rows that FP8 kernels take, and a later one of another shape has not."""

    fp8_cause = (
        "the first batch was taken and this one is not: a loader's last batch is shorter, or sequences differ in "
        "length; the weight gradient's inner size is the number of rows, and FP8 kernels take multiples of 16"
    )
    fp8_next = (
        "DataLoader(..., drop_last=True) leaves a short batch out; or pad it: pytest_fp8.pad_to_multiple(batch) pads a "
        "dict of sequences, and the rows of a single tensor"
    )


class UnreadOutputError(TokenCountError):
    """A layer whose output no loss reads was compiled, with a number of rows that FP8 kernels do not take."""

    fp8_cause = (
        "no loss reads what this layer gives, and torch.compile traces its backward pass all the same; the weight "
        "gradient's inner size is the number of rows, and FP8 kernels take multiples of 16"
    )
    fp8_next = (
        "leave the layer in BF16, Workload(leave=(names,)); or give it a multiple of 16 rows; with compile=False in "
        "the mark it takes any number of them"
    )


def require_aligned_rows(engine: Engine, failed: Exception | None) -> None:
    """Run forward passes, or hand-written steps that change no weight, on the batches of the warm-up, and raise
    :class:`TokenCountError`. ``failed``: what a warm-up step has raised.

    With emulated FP8 the layers are then watched during training as well: a CPU multiplies sizes that no FP8 kernel
    takes, a router sends other rows to them in each step, and a later batch may be shorter. Layers that were seen to be
    called without a backward pass take any number of rows there, too: the pooler of an encoder whose user wants the
    sequence. Those that were not seen at all do not: an expert that got no rows yet, or a layer that reentrant
    checkpointing calls with gradients in the backward pass alone.
    """
    if _takes_any(engine):
        return
    first: list[Drawn] = []
    seen: list[RowCall] = []
    for index in range(CHECKED):
        seen += _look_at(engine, first, functools.partial(engine.timing_batch, index))
        first.append(engine.setup.drawn)
    unread = [call.error for call in seen if not call.trains and call.error is not None]
    if unread and REFUSED in str(failed):
        raise UnreadOutputError(str(unread[0])) from failed
    if engine.case.emulated:
        trained = {call.layer for call in seen if call.trains}
        free = {call.layer for call in seen if not call.trains and (call.error or call.layer not in trained)}
        RowWatch(engine, first).refusing({*engine.conversion.converted} - free)


def explain_rows(engine: Engine) -> None:
    """After a step failed: raise :class:`LaterBatchError` where the batch that was drawn last has rows that FP8 kernels
    do not take. The libraries' own errors speak of the sizes of matrices."""
    drawn = engine.setup.drawn
    if _takes_any(engine) or engine.own_step is not None or not drawn.shapes:
        return
    try:
        engine.training_batch(seed=0, step=0)
        first = engine.setup.drawn
        if first.shapes == drawn.shapes:
            return
        _look_at(engine, [first], functools.partial(engine.training_batch, drawn.seed, drawn.step))
    except TokenCountError:
        raise
    except Exception:
        return  # the step's own error is the one to show


def _takes_any(engine: Engine) -> bool:
    return not engine.conversion.converted


@dataclass(frozen=True)
class RowCall:
    """A call of a converted layer."""

    layer: str
    error: TokenCountError | None
    """What is wrong with its rows, where it trains."""
    trains: bool
    """Whether a backward pass reaches it. A call that none reaches has no weight gradient, and the forward product
    takes any number of rows."""


class RowWatch:
    """Looks at what the converted layers are given. ``first``: the batches that were taken."""

    def __init__(self, engine: Engine, first: list[Drawn]) -> None:
        modules = dict(engine.model.named_modules())
        self._modules = {name: modules[name] for name in engine.conversion.converted}
        self._engine, self._first = engine, first
        self.reached = Reached()
        self._calls: list[tuple[str, TokenCountError | None]] = []

    def calls(self) -> list[RowCall]:
        """In their order."""
        return [RowCall(*call, trains=not self.reached.missed(index)) for index, call in enumerate(self._calls)]

    def noting(self) -> list[Any]:
        """Hooks that note each call."""
        return around(self._modules, self._before, self.reached.after)

    def refusing(self, names: set[str]) -> list[Any]:
        """Hooks that raise in these layers' calls."""

        def before(name: str) -> Callable[..., None]:
            def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                error = self._error(name, args, kwargs) if self._counts() else None
                if error is not None:
                    raise error

            return look

        return [self._modules[name].register_forward_pre_hook(Hook(before(name)), with_kwargs=True) for name in names]

    def _counts(self) -> bool:
        # An evaluation has no weight gradient. The suite's models run without gradients before training.
        return torch.is_grad_enabled() or self._engine.setup.own is None

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            counts = self._counts()
            self.reached.begin(name, len(self._calls) if counts else None)
            if counts:
                self._calls.append((name, self._error(name, args, kwargs)))

        return before

    def _error(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenCountError | None:
        try:
            given = input_of(args, kwargs)
        except StopIteration:
            return None  # no tensor: the layer's own error says so
        rows = given.numel() // max(1, given.shape[-1])
        if rows % self._engine.backend.row_multiple(self._modules[name]) == 0:
            return None
        # Of batches with equal shapes the rows are a router's choice.
        drawn = self._engine.setup.drawn
        later = bool(self._first) and all(drawn.shapes != other.shapes for other in self._first)
        whence = f" from {drawn}" if later else ""
        return (LaterBatchError if later else TokenCountError)(
            f"layer {name!r} was given {rows} rows of input (shape {tuple(given.shape)}){whence}; "
            f"FP8 needs a multiple of {ALIGNMENT}"
        )


def _look_at(engine: Engine, first: list[Drawn], draw: Callable[[], Any]) -> list[RowCall]:
    """Run a batch, and raise :class:`TokenCountError`. Gives the layers' calls."""
    watch = RowWatch(engine, first)
    failure: Exception | None = None
    try:
        with hooked(watch.noting()):
            loss = _run_forward(engine, draw())
        if engine.own_step is None:
            watch.reached.will_reach(loss)
    except Exception as error:
        failure = error
    calls = watch.calls()
    wrong = [(call.layer, call.error) for call in calls if call.trains and call.error is not None]
    if wrong:
        # Once more, so that the error comes from the line that calls the layer.
        with hooked([*watch.noting(), *watch.refusing({layer for layer, _ in wrong})]):
            _run_forward(engine, draw())
        raise wrong[0][1]
    if failure is not None:
        raise failure
    return calls


def _run_forward(engine: Engine, batch: Any) -> Any:
    """The loss; ``None`` of a hand-written step."""
    with torch.compiler.set_stance("force_eager"):
        if engine.own_step is not None:
            with engine.standing_still():
                engine.own_step(engine.wrapped, batch, engine.optimizer, engine.precision)
        else:
            # A user's loss may need gradients on its way; ours would keep activations for nothing.
            with torch.set_grad_enabled(engine.setup.own is not None), engine.standing_still(), engine.precision():
                return engine.loss_of(called(engine), batch)
    return None
