"""FP8 in transformers' Trainer, which has no argument for it: the environment that ``accelerate launch`` sets decides.

The Trainer makes its Accelerator from ``TrainingArguments``. These read ACCELERATE_MIXED_PRECISION where neither bf16
nor fp16 is asked for; Accelerate reads the recipe's options from ACCELERATE_FP8_*.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from pytest_fp8.backends.accelerate import (
    AccelerateTorchAO,
    AccelerateTransformerEngine,
    ThroughAccelerate,
    forget_accelerate,
    on_cpu,
)
from pytest_fp8.backends.base import Backend, MakeOptimizer, Prepared
from pytest_fp8.case import OWN
from pytest_fp8.said import WorkloadError

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case
    from pytest_fp8.workload import Workload

ALL_GATHER = "enable_fsdp_float8_all_gather"
"""torchao's name of the option ``fp8_all_gather``. It wraps the weights for FSDP2, which makes them new parameters that
an optimizer made before does not hold. Accelerate switches it on by default, with or without FSDP."""
OPTIONS = {
    "fp8_format": "ACCELERATE_FP8_FORMAT",
    "amax_history_len": "ACCELERATE_FP8_AMAX_HISTORY_LEN",
    "amax_compute_algo": "ACCELERATE_FP8_AMAX_COMPUTE_ALGO",
    "margin": "ACCELERATE_FP8_MARGIN",
    "fp8_all_gather": "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
}
"""Recipe option -> the variable that Accelerate reads it from."""


class ThroughTrainer(ThroughAccelerate):
    """``Trainer`` under ACCELERATE_FP8_BACKEND, every option of the recipe in the environment."""

    fp8_backend: str
    """What Accelerate calls the library: ``TE`` or ``AO``. It refuses ``te``."""

    def environment(self, case: Case) -> dict[str, str]:
        options = {OPTIONS[name]: str(value) for name, value in case.full_options.items()}
        return {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": self.fp8_backend, **options}

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case) -> Prepared:
        trainer = self.users_trainer
        if trainer is None:
            forget_accelerate()
            with launched(self.environment(case), on_cpu(model)):
                trainer = plain_trainer(model, case)
        prepared = self.prepare_with(trainer.accelerator, model, make_optimizer(model), case)
        prepared.asked = "fp8"
        # A user's own model keeps the loss that came with it, as a Trainer that overrides compute_loss would.
        if case.model != OWN:
            prepared.loss_of = partial(loss_of, trainer)
        return prepared


class TrainerTransformerEngine(ThroughTrainer, AccelerateTransformerEngine):
    """ACCELERATE_FP8_BACKEND=TE."""

    name = "trainer_te"
    short = "trainer.te"
    fp8_backend = "TE"


class TrainerTorchAO(ThroughTrainer, AccelerateTorchAO):
    """ACCELERATE_FP8_BACKEND=AO. No variable names a recipe of torchao, so it is the default one, tensorwise."""

    name = "trainer_torchao"
    short = "trainer.torchao"
    # The Trainer takes no config object: Accelerate makes its default, which wraps weights for FSDP2.
    recipes = (replace(AccelerateTorchAO.recipes[0], options={"fp8_all_gather": True}),)
    parallel = ()
    fp8_backend = "AO"

    def prepare_with(
        self, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, case: Case
    ) -> Prepared:
        """No variable asks for emulation, which a CPU needs: Accelerate's configuration is replaced by the same one
        emulated, before anything is converted."""
        handler = accelerator.ao_recipe_handler
        if case.emulated and handler is not None:
            handler.config = replace(handler.config, emulate=True)
        return super().prepare_with(accelerator, model, optimizer, case)

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        config: Any = getattr(module, "config", None)
        return {**super().recipe_in_force(module), "fp8_all_gather": getattr(config, ALL_GATHER, False)}


def launched(asked: Mapping[str, str], cpu: bool) -> AbstractContextManager[None]:
    """The environment of ``accelerate launch``: the variables ``asked``, and no others that ask for a precision."""
    decide = ("ACCELERATE_FP8_", "ACCELERATE_MIXED_PRECISION")
    others = {name: value for name, value in os.environ.items() if not name.startswith(decide)}
    on = {"ACCELERATE_USE_CPU": "true"} if cpu else {}
    return patch.dict(os.environ, {**others, **asked, **on}, clear=True)


def plain_trainer(model: torch.nn.Module, case: Case) -> Any:
    """A Trainer of a model that comes without one, which reports to no integration."""
    from transformers import Trainer, TrainingArguments

    from pytest_fp8.zoo.training import loss_of_logits

    next_token_loss = loss_of_logits(case.compile)

    # The zoo's labels are the next tokens already; the model's own loss would shift them once more.
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return next_token_loss(outputs.logits, labels)

    # It saves nothing: its folder is the arm's own.
    arguments = TrainingArguments(tempfile.gettempdir(), report_to=[])
    config: Any = getattr(model, "config", None)
    caches = getattr(config, "use_cache", None)
    made = Trainer(model, arguments, compute_loss_func=loss if case.model != OWN else None)
    if caches is not None:
        # The Trainer switches the model's cache off, and the plain reference keeps what build() gave.
        config.use_cache = caches
    return made


def loss_of(trainer: Any, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Forward pass and loss as in the Trainer's own step."""
    with trainer.compute_loss_context_manager():
        # A copy: the Trainer removes the labels from the batch it is given.
        return trainer.compute_loss(model, dict(batch))  # type: ignore[no-any-return]


# -- a user's own Trainer: transformers' own, TRL's SFTTrainer, or another class of it ---------------------------------


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
        self.own, self.backend = own, backend
        self.asked, self.cpu = backend.environment(case), device.type == "cpu"
        self.live: Any = None

    def build(self) -> torch.nn.Module:
        """The model of a Trainer that is made in the environment of ``accelerate launch``: with adapters that it adds,
        and recomputing activations where its arguments say so, as ``train()`` switches it on."""
        from transformers import Trainer

        assert self.own.trainer is not None
        if self.live is None:
            forget_accelerate()
        with launched(self.asked, self.cpu):
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
        import torch

        examples, arguments = self.data.dataset, self.live.args
        size = arguments.gradient_accumulation_steps, arguments.train_batch_size
        drawn = torch.randint(len(examples), size).tolist()
        return tuple(self.data.collate_fn([examples[index] for index in part]) for part in drawn)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The Trainer's own, at its ``learning_rate``, without its schedule."""
        self.live.optimizer = None
        return self.live.create_optimizer()  # type: ignore[no-any-return]

    def step(
        self, model: torch.nn.Module, batch: Any, optimizer: Any, precision: Callable[[], AbstractContextManager[Any]]
    ) -> torch.Tensor:
        """One update of the Trainer's loop: its ``training_step`` for each micro-batch, its clipping, its optimizer."""
        import torch

        trainer, arguments = self.live, self.live.args

        @contextmanager
        def around() -> Iterator[None]:
            with type(trainer).compute_loss_context_manager(trainer), precision():
                yield

        trainer.compute_loss_context_manager = around
        parts, items = trainer.get_batch_samples(iter(batch), len(batch), arguments.device)
        trainer.current_gradient_accumulation_steps = len(parts)
        # Copies: a Trainer may take the labels out of the inputs that it is given.
        loss = torch.stack([trainer.training_step(model, dict(part), items) for part in parts]).sum()
        if arguments.max_grad_norm:
            trainer.accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        model.zero_grad()
        return loss
