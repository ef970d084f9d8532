"""What an arm trains: model, batches, loss and optimizer, from the suite's models or from the user's workload."""

from __future__ import annotations

import inspect
import os
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pytest_fp8.backends import backend
from pytest_fp8.backends.base import Backend
from pytest_fp8.backends.linears import mark_skipped
from pytest_fp8.case import Case
from pytest_fp8.codes import R
from pytest_fp8.errors import Fp8Error
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.tensors import on_host
from pytest_fp8.worker.training.ranks import part_of
from pytest_fp8.worker.training.restored import hooks_of
from pytest_fp8.worker.training.step import described, innermost, name_of
from pytest_fp8.workload import Workload
from pytest_fp8.zoo import data, models, training
from pytest_fp8.zoo.batch import tensors_of, with_tensors
from pytest_fp8.zoo.shapes import SHAPES

OWN_LEARNING_RATE = 1e-3
"""The learning rate of a workload that gives none."""
SeedValues = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""(parameters, buffers) of a fresh model, by their names there. Of tied ones each name has the value."""
KEPT_SHARE = 1 / 8
"""Of the host's free memory that the weights of a workload's models may take between restarts: those of all seeds that
an arm keeps, and of all its ranks."""


class TrainingSetup:
    """Model, data, loss and optimizer, shared by both arms of a pair. A backend may bring a model class of its own."""

    def __init__(self, case: Case, own: Workload | None, backend: Backend, device: torch.device) -> None:
        self.case, self.own, self.device = case, own, device
        self._backend = backend
        self.drawn = Drawn()
        self._built: Callable[[], torch.nn.Module | None] = lambda: None
        """The model that the workload gave last, while it is there."""
        self._kept: dict[int, SeedValues] = {}
        """Seed -> the values of the model that was built for it, in the host's memory."""
        self._hung: dict[torch.nn.Parameter, set[int]] = {}
        """The keys of what the workload's last optimizer hung on each parameter."""

    def fresh_model(self, seed: int) -> torch.nn.Module:
        """The unconverted model with the weights of ``seed``, on this arm's device, adapters included. In bfloat16, but
        for a case with autocast: the suite's models are then in float32, and a workload's as it gives them."""
        if self.own is None:
            if (brought := self._backend.build(self.case, seed, str(self.device))) is not None:
                return brought
            dtype = torch.float32 if self.case.autocast else torch.bfloat16
            model = models.build(self.case.model, seed=seed, device=str(self.device), dtype=dtype)
        else:
            seed_generators(seed)
            model = self.own.build()
            if not isinstance(model, torch.nn.Module):
                raise WorkloadError("no_model", kind=type(model).__name__)
            if model is self._built():
                raise WorkloadError("made_before", kind=type(model).__name__)
            self._built = weakref.ref(model)
            # Transformer Engine's layers are in BF16 outside its context, and may be in both arms.
            fp8 = [name for name, each in model.named_modules() if type(each).__module__.startswith("torchao.float8")]
            if fp8:
                raise WorkloadError("built_in_fp8", layers=", ".join(fp8[:4]))
            model = (model.to(self.device) if self.case.autocast else _in_bfloat16(model, self.device)).train()
        if self.case.lora:
            torch.manual_seed(seed + 1)
            model = models.add_adapters(model, self.case.lora, self.case.lora_targets)
        return model

    def seeded_values(self, seed: int) -> SeedValues:
        """What :meth:`fresh_model` has for a seed, built once where it can be kept: the questions of one case restart
        23 times with three seeds, and a build may take a minute."""
        if seed not in self._kept:
            model = self.fresh_model(seed)
            if not self.keep(seed, model):
                return _values_of(model)
        # What is drawn next must not depend on whether the model was built just now.
        seed_generators(seed)
        return self._kept[seed]

    def keep(self, seed: int, model: torch.nn.Module) -> bool:
        """Keep the values of a workload's fresh model where the host has memory for them. Seeds are asked for in turns:
        of those that do not fit beside each other the newest makes room. Tells whether they were kept."""
        values = _values_of(model)
        size = self.case.gpus * sum(each.numel() * each.element_size() for held in values for each in held.values())
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        room = int(KEPT_SHARE * (free / max(1, size) + len(self._kept)))
        if self.own is None or not room:
            return False
        while len(self._kept) >= room:
            self._kept.popitem()
        # Not on the GPU, where the memory question would count them; and not what the model goes on to train.
        on_the_host = [(held, on_host(held)) for held in values]
        parameters, buffers = (
            {name: tensor if tensor is not held[name] else tensor.detach().clone() for name, tensor in host.items()}
            for held, host in on_the_host
        )
        self._kept[seed] = parameters, buffers
        return True

    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        """The batch of one step of a loss curve, the same in every arm: this rank's part of it, or the ``whole``."""
        if self.own is None:
            tokens = self.case.tokens
            assert tokens is not None, "a model of the suite has its sizes"
            text = data.text_batch(*tokens, seed, step)
            return self._place(text if whole else part_of(self.case, text))
        seed_generators(1_000_003 * (seed + 1) + step)
        batch = batch_of(self.own, step)
        self.drawn = Drawn.of(seed, step, batch)
        return self._place(batch)

    def timing_batch(self, step: int) -> Any:
        """The batch of one timed step: random tokens for the suite's models."""
        tokens = self.case.tokens
        if self.own is not None or tokens is None:
            return self.training_batch(seed=0, step=step)
        whole = data.random_batch(*tokens, SHAPES[self.case.model].vocab, step)
        return self._place(part_of(self.case, whole))

    def loss(self) -> training.LossFunction:
        """The forward pass up to the loss."""
        if self.own is None:
            return training.language_model_loss(self.case.compile)
        return checked_loss(self.own)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """A new optimizer of the model's parameters. Raises :class:`WorkloadError`."""
        if self.own is not None and self.own.optimizer is not None:
            # One that steps in the backward pass hangs its hooks on the parameters, where they outlive it.
            for parameter, keys in self._hung.items():
                for key in keys & hooks_of(parameter).keys():
                    del hooks_of(parameter)[key]
            before = {parameter: set(hooks_of(parameter)) for parameter in model.parameters()}
            made = optimizer_of(self.own.optimizer, model)
            self._hung = {parameter: hooks_of(parameter).keys() - keys for parameter, keys in before.items()}
            return made
        if self.own is not None:
            require_trainable(model)
        return training.adamw(model.parameters(), self._learning_rate())

    def _learning_rate(self) -> float:
        if self.own is not None and self.own.learning_rate is not None:
            return self.own.learning_rate
        if self.case.lora:
            return models.ADAPTERS_LEARNING_RATE
        return OWN_LEARNING_RATE if self.own is not None else SHAPES[self.case.model].learning_rate

    def _place(self, batch: Any) -> Any:
        """The batch on this arm's device; floating-point tensors in bfloat16, like the model, or under autocast as they
        are."""

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            dtype = torch.bfloat16 if tensor.is_floating_point() and not self.case.autocast else tensor.dtype
            return tensor.to(self.device, dtype=dtype, non_blocking=True)

        return with_tensors(batch, placed)


def _values_of(model: torch.nn.Module) -> SeedValues:
    return dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())


def seed_generators(seed: int) -> None:
    """torch's, numpy's and Python's: a user's build(), batch() and forward pass may draw from each."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _in_bfloat16(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The model on its device, all floating-point numbers in bfloat16. One that has parameters in bfloat16 already is
    as its user wants it: what is float32 beside them, such as a router or a norm, stays float32. Complex buffers stay
    complex: ``model.to(torch.bfloat16)`` drops their imaginary parts."""
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        return model.to(device)
    kept = {name: buffer.to(device) for name, buffer in model.named_buffers() if buffer.is_complex()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Casting complex values to real|Complex modules are a new feature")
        model = model.to(device=device, dtype=torch.bfloat16)
    for name, buffer in kept.items():
        holder, _, own = name.rpartition(".")
        setattr(model.get_submodule(holder), own, buffer)
    return model


# -- what the functions of a workload give ----------------------------------------------------------------------------


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


def batch_of(own: Workload, step: int) -> Any:
    """What the workload's ``batch(step)`` gives. Raises :class:`WorkloadError` where that is not one batch."""
    assert own.batch is not None, "a workload without one has a Trainer's"
    try:
        batch = own.batch(step)
    except StopIteration as error:
        # In a generator of ours Python would make "generator raised StopIteration" of it.
        raise WorkloadError("no_batch", function=name_of(own.batch), given=f"StopIteration in step {step}") from error
    missing = batch is None and own.loss is None and own.step is None
    if missing or isinstance(batch, (Iterator, torch.utils.data.DataLoader)):
        raise WorkloadError("no_batch", function=name_of(own.batch), given=described(batch))
    return batch


def converted(convert: Callable[[Any], Any], model: torch.nn.Module) -> torch.nn.Module:
    """The model that the workload's ``convert`` gives; ``model`` itself where it works in place and gives nothing."""
    given = convert(model)
    if given is None or isinstance(given, torch.nn.Module):
        return model if given is None else given
    raise WorkloadError("no_model_converted", function=name_of(convert), given=described(given))


def checked_loss(own: Workload) -> training.LossFunction:
    """The workload's loss, or what its model gives for the batch; raises :class:`WorkloadError` where that is none."""
    loss_of = own.loss or training.default_loss

    def checked(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss: Any = loss_of(model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = described(loss)
        elif torch.is_grad_enabled() and not loss.requires_grad:
            seen = "a tensor without a gradient, detached from the model or made without it"
        else:
            return loss
        require_trainable(model)
        raise WorkloadError(
            "no_loss", function=f"the loss {name_of(own.loss)}" if own.loss else type(model).__name__, given=seen
        )

    return checked


def require_trainable(model: torch.nn.Module) -> None:
    """Asked where nothing can be trained without: a user's own optimizer and step may unfreeze a model later."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError("frozen", kind=type(model).__name__, count=sum(1 for _ in model.parameters()))


def optimizer_of(function: Callable[[Any], Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    """What a workload's ``optimizer`` gives for the model, or for its parameters. Raises :class:`WorkloadError`."""
    given = function(model if takes_model(function) else model.parameters())
    if isinstance(innermost(given), torch.optim.Optimizer) and not isinstance(
        given, torch.optim.lr_scheduler.LRScheduler
    ):
        return given  # type: ignore[no-any-return]
    raise WorkloadError("no_optimizer", function=name_of(function), given=described(given))


def takes_model(function: Callable[[Any], Any]) -> bool:
    """Whether the argument that it is called with has the name ``model``."""
    try:
        return next(iter(inspect.signature(function).parameters), "") == "model"
    except (TypeError, ValueError):
        return False  # some functions written in C tell no signature


# -- in pytest's own process ------------------------------------------------------------------------------------------


def local_model(case: Case, workload: Workload | None, convert: bool) -> torch.nn.Module:
    """A case's model in the caller's own process, for tests that touch its modules: with the weights of seed 0,
    uncompiled; with ``convert`` in the case's recipe.

    Raises :class:`Fp8Error` where the backend changes its whole process, or cannot run here.
    """
    chosen = backend(case.backend)
    if chosen.brings_model or (convert and chosen.through_accelerate):
        raise Fp8Error(
            R.CANNOT_RUN_HERE,
            f"{case.backend} changes the whole process it is used in, so its models live in arms only",
            next_step="use fp8_pair, or fp8_pair.fp8.call(function)",
        )
    usable, reason = chosen.usable(case.recipe, case.emulated)
    if convert and not usable:
        raise Fp8Error(R.CANNOT_RUN_HERE, f"recipe {case.recipe!r} cannot run here: {reason}")
    device = torch.device("cpu" if case.emulated else "cuda")
    setup = TrainingSetup(case, workload, chosen, device)
    model = setup.fresh_model(seed=0)
    if not convert:
        return model
    mark_skipped(model, workload.leave if workload is not None else ())
    if workload is not None and workload.convert is not None:
        return converted(workload.convert, model)
    return chosen.prepare(model, setup.optimizer, case).model
