"""FP8 in transformers' Trainer, which has no argument for it: the environment that ``accelerate launch`` sets decides.

The Trainer makes its Accelerator from ``TrainingArguments``, which read ACCELERATE_MIXED_PRECISION where neither bf16
nor fp16 is asked for; Accelerate reads the recipe's options from ACCELERATE_FP8_*.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.accelerate import (
    AccelerateTorchAO,
    AccelerateTransformerEngine,
    on_cpu,
    prepare_te,
    prepare_torchao,
)
from pytest_fp8.backends.base import Prepared
from pytest_fp8.case import OWN
from pytest_fp8.worker.preparation import forget_accelerate
from pytest_fp8.zoo.training import cross_entropy

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

ALL_GATHER = "enable_fsdp_float8_all_gather"
"""torchao's name of the option ``fp8_all_gather``: weights are wrapped for FSDP2, which makes them new parameters that
an optimizer made before does not know. Accelerate's default, with or without FSDP."""
PREFIX = "ACCELERATE_"
OPTIONS = {
    "fp8_format": "FP8_FORMAT",
    "amax_history_len": "FP8_AMAX_HISTORY_LEN",
    "amax_compute_algo": "FP8_AMAX_COMPUTE_ALGO",
    "margin": "FP8_MARGIN",
    "fp8_all_gather": "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
}
"""Recipe option -> the variable that Accelerate reads it from, without its prefix."""


def environment(library: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The variables that ask for FP8; ``library`` as Accelerate names it, ``TE`` or ``AO``: ``te`` raises there."""
    asked = {"MIXED_PRECISION": "fp8", "FP8_BACKEND": library}
    asked.update({OPTIONS[name]: str(value) for name, value in options.items()})
    return {PREFIX + name: value for name, value in asked.items()}


class TrainerTransformerEngine(AccelerateTransformerEngine):
    """``Trainer`` under ACCELERATE_FP8_BACKEND=TE, every option of the recipe in the environment."""

    name = "trainer_te"

    def prepare(
        self,
        model: torch.nn.Module,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        case: Case,
        compiled: bool,
    ) -> Prepared:
        asked = environment("TE", case.full_options)
        self.switches = _switches(asked)
        with trainer(model, make_optimizer, case, asked) as made:
            return _with_loss(made, case, prepare_te(made.accelerator, model, made.create_optimizer(), compiled))


class TrainerTorchAO(AccelerateTorchAO):
    """``Trainer`` under ACCELERATE_FP8_BACKEND=AO. No variable names one of torchao's recipes: it is the default one,
    tensorwise. None asks for emulation either, so on a CPU the configuration that Accelerate made is replaced by the
    same one emulated, before anything is converted."""

    name = "trainer_torchao"

    def prepare(
        self,
        model: torch.nn.Module,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        case: Case,
        compiled: bool,
    ) -> Prepared:
        from dataclasses import replace

        asked = environment("AO", case.full_options)
        self.switches = _switches(asked)
        with trainer(model, make_optimizer, case, asked) as made:
            if case.emulated:
                handler = made.accelerator.ao_recipe_handler
                handler.config = replace(handler.config, emulate=True)
            return _with_loss(made, case, prepare_torchao(made.accelerator, model, made.create_optimizer()))

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        config: Any = getattr(module, "config", None)
        return {**super().recipe_in_force(module), "fp8_all_gather": getattr(config, ALL_GATHER, False)}


@contextmanager
def trainer(
    model: torch.nn.Module,
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    case: Case,
    asked: Mapping[str, str],
) -> Iterator[Any]:
    """A Trainer made under the environment ``asked``, which is put back afterwards: the process may become another arm.

    It gets the optimizer ready made, as ``optimizers=`` lets users do: the reference arm's, so that both train alike.
    Its output folder is a temporary one, and no integration reports anything.
    """
    import torch
    from transformers import Trainer, TrainingArguments

    loss_of_logits = torch.compile(cross_entropy) if case.compile else cross_entropy

    # The zoo's labels are the next tokens already; the model's own loss would shift them once more.
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return loss_of_logits(outputs.logits, labels)

    forget_accelerate()
    with _environment(asked), tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            bf16=False,
            fp16=False,
            use_cpu=on_cpu(model),
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        yield Trainer(
            model=model,
            args=arguments,
            optimizers=(make_optimizer(model), None),
            compute_loss_func=loss if case.model != OWN else None,
        )


def _with_loss(made: Any, case: Case, prepared: Prepared) -> Prepared:
    """Forward and loss as the Trainer's own step computes them. A user's own model keeps the loss that came with it,
    as a subclass that overrides ``compute_loss`` would."""

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with made.compute_loss_context_manager():
            # A copy: the Trainer takes the labels out of what it is given.
            return made.compute_loss(model, dict(batch))  # type: ignore[no-any-return]

    prepared.loss_of = loss_of if case.model != OWN else None
    return prepared


def _switches(asked: Mapping[str, str]) -> dict[str, str]:
    return {"asked": asked[PREFIX + "MIXED_PRECISION"]}


@contextmanager
def _environment(asked: Mapping[str, str]) -> Iterator[None]:
    """``asked`` and no other of Accelerate's FP8 variables, for as long as it is open."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(PREFIX + "FP8_"):
            del os.environ[name]
    os.environ.update(asked)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
