"""FP8 in transformers' Trainer, which has no argument for it: the environment that ``accelerate launch`` sets decides.

The Trainer makes its Accelerator from ``TrainingArguments``. These read ACCELERATE_MIXED_PRECISION where neither bf16
nor fp16 is asked for; Accelerate reads the recipe's options from ACCELERATE_FP8_*.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
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
from pytest_fp8.backends.base import MakeOptimizer, Prepared
from pytest_fp8.case import OWN

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

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
