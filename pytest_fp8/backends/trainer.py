"""FP8 in transformers' Trainer, which has no argument for it: the environment that ``accelerate launch`` sets decides.

The Trainer makes its Accelerator from ``TrainingArguments``. These read ACCELERATE_MIXED_PRECISION where neither bf16
nor fp16 is asked for; Accelerate reads the recipe's options from ACCELERATE_FP8_*.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
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
PREFIX = "ACCELERATE_"
OPTIONS = {
    "fp8_format": "FP8_FORMAT",
    "amax_history_len": "FP8_AMAX_HISTORY_LEN",
    "amax_compute_algo": "FP8_AMAX_COMPUTE_ALGO",
    "margin": "FP8_MARGIN",
    "fp8_all_gather": "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
}
"""Recipe option -> the variable that Accelerate reads it from, without its prefix."""


class ThroughTrainer(ThroughAccelerate):
    """``Trainer`` under ACCELERATE_FP8_BACKEND, every option of the recipe in the environment."""

    fp8_backend: str
    """What Accelerate calls the library: ``TE`` or ``AO``. It refuses ``te``."""

    def environment(self, case: Case) -> dict[str, str]:
        return fp8_environment(self.fp8_backend, case.full_options)

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case) -> Prepared:
        asked = self.environment(case)
        users = self.users_trainer
        with trainer(model, make_optimizer, case, asked) if users is None else nullcontext(users) as of_model:
            self.adjust(of_model.accelerator, case)
            optimizer = of_model.create_optimizer() if users is None else make_optimizer(model)
            prepared = self.prepare_with(of_model.accelerator, model, optimizer, case)
            prepared.asked = asked[PREFIX + "MIXED_PRECISION"]
            return _with_loss(of_model, case, prepared)

    def adjust(self, accelerator: Any, case: Case) -> None:
        """Ask the Trainer's Accelerator for what no variable can ask for."""


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

    def adjust(self, accelerator: Any, case: Case) -> None:
        """No variable asks for emulation, which a CPU needs: Accelerate's configuration is replaced by the same one
        emulated, before anything is converted."""
        handler = accelerator.ao_recipe_handler
        if case.emulated and handler is not None:
            handler.config = replace(handler.config, emulate=True)

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        config: Any = getattr(module, "config", None)
        return {**super().recipe_in_force(module), "fp8_all_gather": getattr(config, ALL_GATHER, False)}


def fp8_environment(library: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The variables that ask Accelerate for FP8 by ``library`` (``TE`` or ``AO``) with the recipe's options."""
    asked = {"MIXED_PRECISION": "fp8", "FP8_BACKEND": library}
    asked.update({OPTIONS[name]: str(value) for name, value in options.items()})
    return {PREFIX + name: value for name, value in asked.items()}


@contextmanager
def trainer(
    model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case, asked: Mapping[str, str]
) -> Iterator[Any]:
    """A Trainer made under the environment ``asked``, which is restored afterwards.

    It is given the optimizer, as ``optimizers=`` lets users do: the reference arm's, so that both train alike. Its
    output folder is a temporary one, and no integration reports anything.
    """
    from transformers import Trainer, TrainingArguments

    from pytest_fp8.zoo.training import loss_of_logits

    next_token_loss = loss_of_logits(case.compile)

    # The zoo's labels are the next tokens already; the model's own loss would shift them once more.
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return next_token_loss(outputs.logits, labels)

    forget_accelerate()
    with accelerate_environment(asked), tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            bf16=False,
            fp16=False,
            use_cpu=on_cpu(model),
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        config = getattr(model, "config", None)
        caches = getattr(config, "use_cache", None)
        made = Trainer(
            model=model,
            args=arguments,
            optimizers=(make_optimizer(model), None),
            compute_loss_func=loss if case.model != OWN else None,
        )
        if config is not None and caches is not None:
            # The Trainer switches the model's cache off, and the plain reference keeps what build() gave.
            config.use_cache = caches
        yield made


def _with_loss(made: Any, case: Case, prepared: Prepared) -> Prepared:
    """Compute forward pass and loss as the Trainer's own step does. A user's own model keeps the loss that came with
    it, as a subclass of Trainer that overrides ``compute_loss`` would."""

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with made.compute_loss_context_manager():
            # A copy: the Trainer removes the labels from the batch it is given.
            return made.compute_loss(model, dict(batch))  # type: ignore[no-any-return]

    prepared.loss_of = loss_of if case.model != OWN else None
    return prepared


def accelerate_environment(asked: Mapping[str, str]) -> AbstractContextManager[None]:
    """Set the variables ``asked`` while the context is open, and unset all others that ask for a precision."""
    decide = (PREFIX + "FP8_", PREFIX + "MIXED_PRECISION")
    others = {name: value for name, value in os.environ.items() if not name.startswith(decide)}
    return patch.dict(os.environ, {**others, **asked}, clear=True)


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
        import torch

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
        import torch

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
