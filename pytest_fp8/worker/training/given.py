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

from pytest_fp8.codes import R
from pytest_fp8.worker.training.phases import innermost
from pytest_fp8.worker.training.step import WorkloadError, described, name_of
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
        raise WorkloadError(
            R.MODEL_NOT_FRESH,
            f"the workload's build() gave one {type(model).__name__} that was made before, not a new one",
            "build() is called for each seed and each arm; the training and conversion of one would be in the next",
            "make the model inside build(); or return copy.deepcopy(model)",
        )


def require_weights(model: torch.nn.Module) -> None:
    lazy = [name for name, value in model.named_parameters() if torch.nn.parameter.is_lazy(value)]
    if lazy:
        raise WorkloadError(
            R.BAD_MODEL,
            f"the workload's build() gave a model whose {lazy[0]!r} has no size yet",
            "a lazy layer makes its weights in the first forward pass, but the conversion comes before it",
            "call the model once in build(), on a batch of the right size, before returning it",
        )


def require_unconverted(model: torch.nn.Module) -> None:
    """Raise :class:`WorkloadError` where ``build()`` gave a model that is in FP8 already: the reference would be, too.
    Transformer Engine's layers are in BF16 outside its context, and may be in both arms."""
    converted = [name for name, layer in model.named_modules() if type(layer).__module__.startswith("torchao.float8")]
    if converted:
        raise WorkloadError(
            R.BUILT_IN_FP8,
            f"the workload's build() gave a model with FP8 layers: {', '.join(converted[:4])}",
            "build() makes the model of both arms, and the reference trains in BF16",
            "take the conversion out of build() and give it to the workload: Workload(convert=...)",
        )


def converted(convert: Callable[[Any], Any], model: torch.nn.Module) -> torch.nn.Module:
    """The model that the workload's ``convert`` gives; ``model`` itself where it works in place and gives nothing."""
    given = convert(model)
    if given is None or isinstance(given, torch.nn.Module):
        return model if given is None else given
    raise WorkloadError(
        R.BAD_CONVERT,
        f"the workload's convert {name_of(convert)} must give the model, it gave {described(given)}",
        "what it gives is trained in the model's place",
        "return the converted model, or nothing where the conversion works in place",
    )


def checked_precision(precision: Callable[[], Any]) -> Callable[[], Any]:
    """The workload's ``precision``, which raises :class:`WorkloadError` where it gives no context."""

    def checked() -> Any:
        given = precision()
        if not (hasattr(type(given), "__enter__") and hasattr(type(given), "__exit__")):
            raise WorkloadError(
                R.BAD_CONVERT,
                f"the workload's precision {name_of(precision)} must give a context, it gave {described(given)}",
                "the forward pass runs inside: with precision():",
                "return what a with statement takes: precision=lambda: torch.autocast('cuda', torch.bfloat16)",
            )
        return given

    return checked


def batch_of(own: Workload, step: int) -> Any:
    """What the workload's ``batch(step)`` gives. Raises :class:`WorkloadError` where no step can be trained with it."""
    try:
        return _checked_batch(own, own.batch(step))
    except StopIteration as error:
        # In a generator of ours Python would make "generator raised StopIteration" of it.
        raise WorkloadError(
            R.BAD_BATCH,
            f"the workload's batch {name_of(own.batch)} raised StopIteration in step {step}",
            "an iterator gives each of its batches once and is then at its end; each arm asks for the same steps more "
            "than once",
            "return the batch of this step: batches[step % len(batches)], with batches = list(loader) made once",
        ) from error


def _checked_batch(own: Workload, batch: Any) -> Any:
    if isinstance(batch, Iterator):
        raise WorkloadError(
            R.BAD_BATCH,
            f"the workload's batch(step) must give one batch, it gave a {type(batch).__name__}",
            "a function with yield gives all its batches at once, and so does iter(loader)",
            "return the batch of this step: batches[step % len(batches)] of a list that is made once",
        )
    if isinstance(batch, torch.utils.data.DataLoader):
        raise WorkloadError(
            R.BAD_BATCH,
            "the workload's batch(step) must give one batch, it gave a DataLoader",
            "a loader gives many batches, and another order in each arm",
            "return the batch of this step: batches[step % len(batches)], with batches = list(loader) made once",
        )
    if batch is None and own.loss is None and own.step is None:
        raise WorkloadError(
            R.BAD_BATCH,
            f"the workload's batch {name_of(own.batch)} gave nothing",
            "a function without a return gives None, and without a loss function the model is called with the batch",
            "return the batch at the end of batch(step)",
        )
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
            raise WorkloadError(
                R.NO_LOSS,
                f"the model must give its loss, as a tensor with one element or as its result's .loss; "
                f"{type(model).__name__} gave {seen}",
                "the workload has no loss function, so the model's result is used as the loss",
                "give a loss function: Workload(loss=lambda model, batch: ...), e.g. model(batch)[1] or "
                "model(batch)['loss']",
            )
        raise WorkloadError(
            R.NO_LOSS,
            f"the loss {name_of(own.loss)} must give a tensor with one element, it gave {seen}",
            "training goes backward from the loss: a float (.item()) has no gradient, and a function without a return "
            "gives nothing",
            _instead_of(loss),
        )

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
        raise WorkloadError(
            R.TRAINABLE_LOST,
            "the conversion left no trainable parameter, and build() gave some",
            "an FP8 layer takes over a Linear's weight and bias alone: parameters that a class derived from nn.Linear "
            "has beside them, such as adapters, are gone",
            "leave such layers as they are, Workload(leave=(names,)), or keep these parameters in a module of their "
            "own",
        )
    count = sum(1 for _ in model.parameters())
    raise WorkloadError(
        R.NOTHING_TRAINABLE,
        f"the workload's build() gave a model without a trainable parameter: {type(model).__name__}, "
        + (f"whose {count} parameters are all frozen" if count else "which has no parameter at all"),
        "training goes backward to parameters with requires_grad, and there is none: requires_grad_(False) for all of "
        "them, or layers that were never added",
        "leave what is to be trained unfrozen in build(); or add adapters to the frozen model: "
        "@pytest.mark.fp8(lora=16)"
        if count
        else "return the model with its layers at the end of build()",
    )


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
        raise WorkloadError(
            R.NO_LOSS,
            f"{type(model).__name__} cannot be called with {how} ({described(batch)}): {error}",
            "the workload has no loss function, so the model is called with the batch and must give its loss",
            "give a loss function: Workload(loss=lambda model, batch: ...), e.g. "
            + ("F.cross_entropy(model(batch[0]), batch[1])" if pairs else "F.mse_loss(model(batch['x']), batch['y'])"),
        ) from error


def checked_optimizer(given: Any, function: Any) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        raise WorkloadError(
            R.BAD_OPTIMIZER,
            f"the workload's optimizer {name_of(function)} must give the optimizer, it gave its schedule, a "
            f"{type(given).__name__}",
            "the schedule is followed as the optimizer's own",
            "optimizer.scheduler = schedule, and return the optimizer",
        )
    if isinstance(innermost(given), torch.optim.Optimizer):
        return given  # type: ignore[no-any-return]
    raise WorkloadError(
        R.BAD_OPTIMIZER,
        f"the workload's optimizer {name_of(function)} must give one torch.optim.Optimizer, it gave {described(given)}",
        "its steps are watched and its state is saved and loaded through the interface of that class",
        "use one optimizer with several parameter groups; or, for two algorithms, one class derived from "
        "torch.optim.Optimizer that has the groups of both, steps both, and shares its state with both: "
        "one.state = two.state = self.state, set again in load_state_dict(), which makes a new state and new groups",
    )
