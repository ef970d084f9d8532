"""What an arm trains: model, batches, loss and optimizer, from the suite's models or from the user's workload."""

from __future__ import annotations

from typing import Any

import torch

from pytest_fp8.backends.base import Backend
from pytest_fp8.case import Case
from pytest_fp8.worker.phases import innermost
from pytest_fp8.worker.step import WorkloadError, described, name_of
from pytest_fp8.workload import Workload
from pytest_fp8.zoo import adapters, data, models, training
from pytest_fp8.zoo.shapes import SHAPES

OWN_LEARNING_RATE = 1e-3
"""The learning rate of a workload that gives none."""


class TrainingSetup:
    """Model, data, loss and optimizer, shared by both arms of a pair. A backend may bring a model class of its own."""

    def __init__(self, case: Case, own: Workload | None, backend: Backend, device: torch.device) -> None:
        self.case, self.own, self.device = case, own, device
        self._backend = backend

    def fresh_model(self, seed: int) -> torch.nn.Module:
        """The unconverted model with the weights of ``seed``: bfloat16, on this arm's device, adapters included."""
        if self.own is None:
            brought = self._backend.build(self.case, seed, str(self.device))
            if brought is not None:
                return brought
            model = models.build(self.case.model, seed=seed, device=str(self.device), weights=self.case.weights)
        else:
            torch.manual_seed(seed)
            model = self.own.build()
            if not isinstance(model, torch.nn.Module):
                raise WorkloadError(
                    f"the workload's build() must give a torch.nn.Module, it gave {type(model).__name__}",
                    "a function without a return gives None",
                    "return the model at the end of build()",
                )
            _require_weights(model)
            model = model.to(device=self.device, dtype=torch.bfloat16).train()
        if self.case.lora:
            torch.manual_seed(seed + 1)
            model = adapters.add_adapters(model, self.case.lora, self.case.lora_targets)
        return model

    def training_batch(self, seed: int, step: int) -> Any:
        """The batch of one step of a loss curve; the same in every arm."""
        if self.own is None:
            tokens = self.case.tokens
            assert tokens is not None, "a model of the suite has its sizes"
            return self._place(data.text_batch(*tokens, seed, step))
        torch.manual_seed(1_000_003 * (seed + 1) + step)
        batch = self.own.batch(step)
        if type(batch).__module__ == "numpy":
            raise WorkloadError(
                f"the workload's batch(step) must give tensors, it gave {type(batch).__name__}",
                "a batch is a tensor, or a dict, list or tuple of tensors",
                "torch.from_numpy(array), drawn by torch's generators: numpy's are not seeded for each step",
            )
        return self._place(batch)

    def timing_batch(self, step: int) -> Any:
        """The batch of one timed step: random tokens for the suite's models."""
        tokens = self.case.tokens
        if self.own is not None or tokens is None:
            return self.training_batch(seed=0, step=step)
        return self._place(data.random_batch(*tokens, SHAPES[self.case.model].vocab, step))

    def loss(self) -> training.LossFunction:
        """The forward pass up to the loss."""
        if self.own is None:
            return training.language_model_loss(self.case.compile)
        return _checked_loss(self.own)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """A new optimizer of the model's parameters. Raises :class:`WorkloadError`."""
        if self.own is not None and self.own.optimizer is not None:
            return _checked_optimizer(self.own.optimizer(model.parameters()), self.own.optimizer)
        return training.adamw(model.parameters(), self._learning_rate())

    def _learning_rate(self) -> float:
        if self.own is not None and self.own.learning_rate is not None:
            return self.own.learning_rate
        if self.case.lora:
            return adapters.LEARNING_RATE
        return OWN_LEARNING_RATE if self.own is not None else SHAPES[self.case.model].learning_rate

    def _place(self, batch: Any) -> Any:
        """The batch on this arm's device; floating-point tensors in bfloat16, like the model."""
        if isinstance(batch, torch.Tensor):
            dtype = torch.bfloat16 if batch.is_floating_point() else batch.dtype
            return batch.to(self.device, dtype=dtype, non_blocking=True)
        if isinstance(batch, dict):
            return {name: self._place(value) for name, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            placed = [self._place(value) for value in batch]
            # A named tuple takes its values as separate arguments.
            return type(batch)(*placed) if hasattr(batch, "_fields") else type(batch)(placed)
        return batch


# -- what a workload's functions return -------------------------------------------------------------------------------


def _require_weights(model: torch.nn.Module) -> None:
    lazy = [name for name, value in model.named_parameters() if torch.nn.parameter.is_lazy(value)]
    if lazy:
        raise WorkloadError(
            f"the workload's build() gave a model whose {lazy[0]!r} has no size yet",
            "a lazy layer makes its weights in the first forward pass, but the conversion comes before it",
            "call the model once in build(), on a batch of the right size, before returning it",
        )


def _checked_loss(own: Workload) -> training.LossFunction:
    """The workload's loss, which raises :class:`WorkloadError` where it returns no loss."""
    loss_of = own.loss or training.default_loss

    def checked(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = described(loss)
        elif torch.is_grad_enabled() and not loss.requires_grad:
            seen = "a tensor without a gradient, detached from the model or made without it"
        else:
            return loss
        if own.loss is None:
            raise WorkloadError(
                f"the model must give its loss, as a tensor with one element or as its result's .loss; "
                f"{type(model).__name__} gave {seen}",
                "the workload has no loss function, so the model's result is used as the loss",
                "give a loss function: Workload(loss=lambda model, batch: ...), e.g. model(batch)[1] or "
                "model(batch)['loss']",
            )
        raise WorkloadError(
            f"the loss {name_of(own.loss)} must give a tensor with one element, it gave {seen}",
            "training goes backward from the loss: a float (.item()) has no gradient, and a function without a return "
            "gives nothing",
            "return the tensor itself, as the mean over the batch: loss.mean(), without .item() and .detach()",
        )

    return checked


def _checked_optimizer(given: Any, function: Any) -> torch.optim.Optimizer:
    if isinstance(innermost(given), torch.optim.Optimizer):
        return given  # type: ignore[no-any-return]
    raise WorkloadError(
        f"the workload's optimizer {name_of(function)} must give one torch.optim.Optimizer, it gave {described(given)}",
        "its steps are watched and its state is saved and loaded through the interface of that class",
        "use one optimizer with several parameter groups; or, for two algorithms, one class derived from "
        "torch.optim.Optimizer that has the groups of both, steps both, and shares its state with both: "
        "one.state = two.state = self.state",
    )
