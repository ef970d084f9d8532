"""What the functions of a workload give: checked, with an error of our own where it cannot be trained with."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.training.phases import innermost
from pytest_fp8.worker.training.step import described, name_of
from pytest_fp8.workload import Workload
from pytest_fp8.zoo import training
from pytest_fp8.zoo.batch import tensors_of


def held_by(function: Any) -> list[Any]:
    """What a function refers to: values that it closes over, and those of its module; a partial's arguments."""
    held: list[Any] = []
    while isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values()]
        function = function.func
    # A variable that a function closes over and that has no value yet is a ValueError.
    with contextlib.suppress(ValueError):
        if inspect.isfunction(function):
            named = inspect.getclosurevars(function)
            held += [*named.nonlocals.values(), *named.globals.values(), *(function.__defaults__ or ())]
    return held


def require_fresh(model: torch.nn.Module, before: Sequence[Any]) -> None:
    """Raise :class:`WorkloadError` where ``build()`` gave a model that was there ``before`` it was called."""
    if any(model is one for one in before):
        raise WorkloadError("made_before", kind=type(model).__name__)


def require_weights(model: torch.nn.Module) -> None:
    lazy = [name for name, value in model.named_parameters() if torch.nn.parameter.is_lazy(value)]
    if lazy:
        raise WorkloadError("lazy", weight=lazy[0])


def require_unconverted(model: torch.nn.Module) -> None:
    """Raise :class:`WorkloadError` where ``build()`` gave a model that is in FP8 already: the reference would be, too.
    Transformer Engine's layers are in BF16 outside its context, and may be in both arms."""
    converted = [name for name, layer in model.named_modules() if type(layer).__module__.startswith("torchao.float8")]
    if converted:
        raise WorkloadError("built_in_fp8", layers=", ".join(converted[:4]))


def converted(convert: Callable[[Any], Any], model: torch.nn.Module) -> torch.nn.Module:
    """The model that the workload's ``convert`` gives; ``model`` itself where it works in place and gives nothing."""
    given = convert(model)
    if given is None or isinstance(given, torch.nn.Module):
        return model if given is None else given
    raise WorkloadError("no_model_converted", function=name_of(convert), given=described(given))


def checked_precision(precision: Callable[[], Any]) -> Callable[[], Any]:
    """The workload's ``precision``, which raises :class:`WorkloadError` where it gives no context."""

    def checked() -> Any:
        given = precision()
        if not (hasattr(type(given), "__enter__") and hasattr(type(given), "__exit__")):
            raise WorkloadError("no_context", function=name_of(precision), given=described(given))
        return given

    return checked


def batch_of(own: Workload, step: int) -> Any:
    """What the workload's ``batch(step)`` gives. Raises :class:`WorkloadError` where no step can be trained with it."""
    try:
        return _checked_batch(own, own.batch(step))
    except StopIteration as error:
        # In a generator of ours Python would make "generator raised StopIteration" of it.
        raise WorkloadError("batches_at_end", function=name_of(own.batch), step=step) from error


def _checked_batch(own: Workload, batch: Any) -> Any:
    if isinstance(batch, Iterator):
        raise WorkloadError("iterator", kind=type(batch).__name__)
    if isinstance(batch, torch.utils.data.DataLoader):
        raise WorkloadError("loader")
    if batch is None and own.loss is None and own.step is None:
        raise WorkloadError("no_batch", function=name_of(own.batch))
    return batch


@dataclass(frozen=True)
class Drawn:
    """The workload's batch that was drawn last."""

    seed: int = 0
    step: int = 0
    shapes: tuple[str, ...] = ()
    """Name and shape of each tensor in it."""

    @classmethod
    def of(cls, seed: int, step: int, batch: Any) -> Drawn:
        return cls(seed, step, tuple(f"{name} {tuple(tensor.shape)}".strip() for name, tensor in tensors_of(batch)))

    def __str__(self) -> str:
        """``batch(step=3) of seed 1 (x (13, 64), labels (13,))``."""
        return f"batch(step={self.step}) of seed {self.seed} ({', '.join(self.shapes[:4]) or 'no tensor'})"


def checked_loss(own: Workload, was_trainable: Callable[[], bool]) -> training.LossFunction:
    """The workload's loss, which raises :class:`WorkloadError` where it returns no loss. ``was_trainable``: whether
    ``build()`` gave a model that can be trained."""

    def checked(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = own.loss(model, batch) if own.loss is not None else _models_own_loss(model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = described(loss)
        elif torch.is_grad_enabled() and not loss.requires_grad:
            seen = "a tensor without a gradient, detached from the model or made without it"
        else:
            return loss
        require_trainable(model, was_trainable())
        if own.loss is None:
            raise WorkloadError("models_no_loss", kind=type(model).__name__, given=seen)
        raise WorkloadError("no_loss", function=name_of(own.loss), given=seen, instead=_instead_of(loss))

    return checked


def _instead_of(loss: Any) -> str:
    """What to return in place of what is no loss."""
    if isinstance(loss, dict) and loss:
        key = "loss" if "loss" in loss else next(iter(loss))
        return f"return one tensor and not the dict that holds it: result[{key!r}] in place of result"
    return "return the tensor itself, as the mean over the batch: loss.mean(), without .item() and .detach()"


def require_trainable(model: torch.nn.Module, was: bool) -> None:
    """Asked where nothing can be trained without: a user's own optimizer and step may unfreeze a model later. ``was``:
    whether ``build()`` gave a model that can be trained."""
    if trainable(model):
        return
    if was:
        raise WorkloadError("trainable_lost")
    count = sum(1 for _ in model.parameters())
    raise WorkloadError("frozen" if count else "no_parameter", kind=type(model).__name__, count=count)


def trainable(model: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _models_own_loss(model: torch.nn.Module, batch: Any) -> Any:
    """What the model gives for the batch. Raises :class:`WorkloadError` where it cannot be called with it."""
    try:
        return training.default_loss(model, batch)
    except (TypeError, AttributeError) as error:
        pairs = isinstance(batch, (list, tuple))
        # A model that is called with the wrong arguments fails before its own first line.
        uncalled = traceback.extract_tb(error.__traceback__)[-1].name in ("default_loss", "_call_impl")
        if not pairs and not uncalled:
            raise
        how = "the whole batch as its one argument" if not isinstance(batch, Mapping) else "the dict's keys as names"
        given = "F.cross_entropy(model(batch[0]), batch[1])" if pairs else "F.mse_loss(model(batch['x']), batch['y'])"
        facts = {"kind": type(model).__name__, "how": how, "batch": described(batch), "error": error, "example": given}
        raise WorkloadError("not_called", **facts) from error


def optimizer_of(function: Callable[[Any], Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    """What a workload's ``optimizer`` gives for the model, or for its parameters. Raises :class:`WorkloadError`."""
    parameters = model.parameters()
    try:
        return checked_optimizer(function(model if takes_model(function) else parameters), function)
    except AttributeError as error:
        if error.obj is not parameters:
            raise
        raise WorkloadError("wants_model", function=name_of(function), attribute=error.name) from error


def takes_model(function: Callable[[Any], Any]) -> bool:
    """Whether the argument that it is called with has the name ``model``."""
    try:
        return next(iter(inspect.signature(function).parameters), "") == "model"
    except (TypeError, ValueError):
        return False  # some functions written in C tell no signature


def checked_optimizer(given: Any, function: Any) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        raise WorkloadError("schedule_alone", function=name_of(function), kind=type(given).__name__)
    if isinstance(innermost(given), torch.optim.Optimizer):
        return given  # type: ignore[no-any-return]
    raise WorkloadError("no_optimizer", function=name_of(function), given=described(given))
