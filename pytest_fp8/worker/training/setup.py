"""What an arm trains: model, batches, loss and optimizer, from the suite's models or from the user's workload."""

from __future__ import annotations

import os
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pytest_fp8.backends.base import Backend, BringsModel
from pytest_fp8.case import Case
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.training.given import (
    Drawn,
    batch_of,
    checked_loss,
    held_by,
    optimizer_of,
    require_fresh,
    require_trainable,
    require_unconverted,
    require_weights,
    trainable,
)
from pytest_fp8.worker.training.ranks import part_of
from pytest_fp8.worker.training.restored import hooks_of
from pytest_fp8.worker.training.seed_values import SeedValues
from pytest_fp8.workload import Workload
from pytest_fp8.zoo import adapters, data, models, training
from pytest_fp8.zoo.batch import with_tensors
from pytest_fp8.zoo.shapes import SHAPES

OWN_LEARNING_RATE = 1e-3
"""The learning rate of a workload that gives none."""
KEPT_SHARE = 1 / 16
"""Of the host's free memory that the weights of a workload's model may take between restarts, all ranks together."""


class TrainingSetup:
    """Model, data, loss and optimizer, shared by both arms of a pair. A backend may bring a model class of its own."""

    def __init__(self, case: Case, own: Workload | None, backend: Backend, device: torch.device) -> None:
        self.case, self.own, self.device = case, own, device
        self._backend = backend
        self.drawn = self.first = Drawn()
        """The workload's batches that were drawn last and first."""
        self._built: Callable[[], torch.nn.Module | None] = lambda: None
        """The model that the workload gave last, while it is there."""
        self._trainable = True
        """Whether it can be trained."""
        self._kept: tuple[int, SeedValues] | None = None
        """A seed and the values of the model that was built for it, in the host's memory."""
        self._hung: dict[torch.nn.Parameter, set[int]] = {}
        """The keys of what the workload's last optimizer hung on each parameter."""

    def fresh_model(self, seed: int) -> torch.nn.Module:
        """The unconverted model with the weights of ``seed``: bfloat16, on this arm's device, adapters included."""
        if self.own is None:
            if isinstance(self._backend, BringsModel):
                return self._backend.build(self.case, seed, str(self.device))
            model = models.build(self.case.model, seed=seed, device=str(self.device), weights=self.case.weights)
        else:
            seed_generators(seed)
            before = [*held_by(self.own.build), self._built()]
            model = self.own.build()
            if not isinstance(model, torch.nn.Module):
                raise WorkloadError("no_model", kind=type(model).__name__)
            require_fresh(model, before)
            self._built = weakref.ref(model)
            require_weights(model)
            require_unconverted(model)
            self._trainable = trainable(model)
            model = _in_bfloat16(model, self.device).train()
        if self.case.lora:
            torch.manual_seed(seed + 1)
            model = adapters.add_adapters(model, self.case.lora, self.case.lora_targets)
        return model

    def seeded_values(self, seed: int) -> SeedValues:
        """What :meth:`fresh_model` has for a seed. A workload's is built once for restarts that follow each other: four
        questions of one case restart 23 times, and a build may take a minute."""
        if self._kept is None or self._kept[0] != seed:
            self._kept = None
            values = SeedValues.of(self.fresh_model(seed))
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if self.own is None or values.size * self.case.gpus > KEPT_SHARE * free:
                return values
            # Not on the GPU, where the memory question would count it.
            self._kept = seed, values.on_host()
        # What is drawn next must not depend on whether the model was built just now.
        seed_generators(seed)
        return self._kept[1]

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
        self.first = self.first if self.first.shapes else self.drawn
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
        return checked_loss(self.own, lambda: self._trainable)

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
            require_trainable(model, self._trainable)
        return training.adamw(model.parameters(), self._learning_rate())

    def _learning_rate(self) -> float:
        if self.own is not None and self.own.learning_rate is not None:
            return self.own.learning_rate
        if self.case.lora:
            return adapters.LEARNING_RATE
        return OWN_LEARNING_RATE if self.own is not None else SHAPES[self.case.model].learning_rate

    def _place(self, batch: Any) -> Any:
        """The batch on this arm's device; floating-point tensors in bfloat16, like the model."""

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
            return tensor.to(self.device, dtype=dtype, non_blocking=True)

        return with_tensors(batch, placed)


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
        model.get_submodule(holder)._buffers[own] = buffer
    return model
