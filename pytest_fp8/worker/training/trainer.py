"""The functions of a workload whose Trainer has them: transformers' own, TRL's SFTTrainer, or another class of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from pytest_fp8.backends.accelerate import forget_accelerate
from pytest_fp8.backends.base import Backend
from pytest_fp8.backends.trainer import accelerate_environment
from pytest_fp8.case import Case
from pytest_fp8.said import WorkloadError
from pytest_fp8.workload import Workload


def by_trainer(own: Workload, backend: Backend, case: Case, device: torch.device) -> Workload:
    """The workload with the functions of its Trainer. Those that the user gave beside ``trainer=`` stay."""
    trainers = OfTrainer(own, backend, case, device)
    return replace(
        own,
        build=trainers.build,
        batch=own.batch or trainers.batch,
        optimizer=own.optimizer or trainers.optimizer,
        step=own.step or trainers.step,
    )


class OfTrainer:
    """One arm's Trainer: the one of the model that was built first, which is the live one."""

    def __init__(self, own: Workload, backend: Backend, case: Case, device: torch.device) -> None:
        self.own, self.backend, self.device, self.asked = own, backend, device, backend.environment(case)
        self.live: Any = None

    def build(self) -> torch.nn.Module:
        """The model of a Trainer that is made in the environment of ``accelerate launch``: with adapters that it adds,
        and recomputing activations where its arguments say so, as ``train()`` switches it on."""
        from transformers import Trainer

        assert self.own.trainer is not None
        if self.live is None:
            forget_accelerate()
        with self._environment():
            made = self.own.trainer(self.own.build())
        if not isinstance(made, Trainer):
            raise WorkloadError("no_trainer", kind=type(made).__name__)
        model: Any = made.model
        if made.args.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=made.args.gradient_checkpointing_kwargs)
        if self.live is None:
            self.live, self.data = made, made.get_train_dataloader()
            self.backend.users_trainer = made
        return model  # type: ignore[no-any-return]

    def batch(self, step: int) -> tuple[Any, ...]:
        """The micro-batches of one step, drawn from the Trainer's dataset and made by its collator."""
        examples, arguments = self.data.dataset, self.live.args
        return tuple(
            self.data.collate_fn(
                [examples[index] for index in torch.randint(len(examples), (arguments.train_batch_size,)).tolist()]
            )
            for _ in range(arguments.gradient_accumulation_steps)
        )

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The Trainer's own, at its ``learning_rate``, without its schedule."""
        self.live.optimizer = None
        return self.live.create_optimizer()  # type: ignore[no-any-return]

    def step(
        self, model: torch.nn.Module, batch: Any, optimizer: Any, precision: Callable[[], AbstractContextManager[Any]]
    ) -> torch.Tensor:
        """One update of the Trainer's loop: its ``training_step`` for each micro-batch, its clipping, its optimizer."""
        trainer, arguments = self.live, self.live.args
        trainer.compute_loss_context_manager = lambda: _both(trainer, precision)
        parts, items = trainer.get_batch_samples(iter(batch), len(batch), arguments.device)
        trainer.current_gradient_accumulation_steps = len(parts)
        # Copies: a Trainer may take the labels out of the inputs that it is given.
        loss = torch.stack([trainer.training_step(model, dict(part), items) for part in parts]).sum()
        if arguments.max_grad_norm:
            trainer.accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        model.zero_grad()
        return loss

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """That of ``accelerate launch`` with the backend's recipe; else one that says nothing of FP8."""
        cpu = {"ACCELERATE_USE_CPU": "true"} if self.device.type == "cpu" else {}
        with accelerate_environment({**self.asked, **cpu}):
            yield


@contextmanager
def _both(trainer: Any, precision: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """The Trainer's own context around its forward pass, and the arm's inside."""
    with type(trainer).compute_loss_context_manager(trainer), precision():
        yield
