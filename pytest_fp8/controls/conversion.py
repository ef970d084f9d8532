"""Breakages of the conversion: nothing converted, too little, too much, by another recipe or by another library."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import ALIGNMENT, Conversion
from pytest_fp8.backends.linears import plan
from pytest_fp8.worker.fault_points import FaultPoints, Precision

if TYPE_CHECKING:
    import torch

    from pytest_fp8.worker.engine import Engine

MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"


class NothingReadsTheEnvironment(FaultPoints):
    """A plain training loop under an environment that asks for FP8: no Accelerator is ever made."""

    def start(self, engine: Engine) -> None:
        os.environ[MIXED_PRECISION] = "fp8"

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        del os.environ[MIXED_PRECISION]  # the arm has noted it; the process may become another arm
        return plan(engine.model)


class TrainerBf16Wins(FaultPoints):
    """transformers' own Trainer with ``bf16=True`` under an environment that asks for FP8."""

    def start(self, engine: Engine) -> None:
        os.environ[MIXED_PRECISION] = "fp8"

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        from transformers import Trainer, TrainingArguments

        meant = plan(engine.model)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, bf16=True, use_cpu=engine.device.type == "cpu", report_to=[]
            )
            trainer: Any = Trainer(model=engine.model, args=arguments)
            engine.model = trainer.accelerator.prepare_model(engine.model)
        return meant

    def warm(self, engine: Engine) -> None:
        """Take back what Accelerate keeps for a whole process, which may become another arm."""
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop(MIXED_PRECISION, None)


class StopsAtTheFirstOddLayer(FaultPoints):
    """The loop of Accelerate's ``convert_model``: it *returns* at a Linear whose sizes are not multiples of 16, so the
    later children of the same parent stay as they are."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        meant = plan(engine.model)
        _convert_model(engine.model, torchao_config(engine, engine.case.recipe))
        return meant


def _convert_model(model: torch.nn.Module, config: Any) -> None:
    import torch
    from torchao.float8.float8_linear import Float8Linear

    for name, module in model.named_children():
        if isinstance(module, torch.nn.Linear):
            if any(size % ALIGNMENT for size in module.weight.shape):
                return
            setattr(model, name, Float8Linear.from_float(module, config=config))
        else:
            _convert_model(module, config)


class RecipeDropped(FaultPoints):
    """The recipe asked for never reaches the library, which takes its default."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        return _by_torchao(engine.model, torchao_config(engine, None))


class HeadConverted(FaultPoints):
    """No filter is passed: every Linear is converted, the output projection included."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        from torchao.float8 import convert_to_float8_training

        meant = plan(engine.model)
        convert_to_float8_training(engine.model, config=torchao_config(engine, engine.case.recipe))
        return meant


class AdaptersConverted(FaultPoints):
    """The filter knows the output projection and not the LoRA matrices, which were added before."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        config = torchao_config(engine, engine.case.recipe)
        return _by_torchao(engine.model, config, takes=lambda name: not name.endswith("lm_head"))


class HookDropped(FaultPoints):
    """torchao's conversion as it comes: another module stands where the Linear with the hook stood."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        return _by_torchao(engine.model, torchao_config(engine, engine.case.recipe))


class OtherLibraryChosen(FaultPoints):
    """Transformer Engine was meant; torchao, installed beside it, converts the model."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        return _by_torchao(engine.model, None)

    def precision(self, engine: Engine, precision: Precision) -> Precision:
        return nullcontext


def _by_torchao(model: torch.nn.Module, config: Any, takes: Callable[[str], bool] | None = None) -> Conversion:
    """torchao's own conversion of the layers that ``takes`` names, by default those that are meant to be FP8, which it
    gives in any case; ``config=None`` for torchao's defaults."""
    from torchao.float8 import convert_to_float8_training

    meant = plan(model)
    chosen = takes or set(meant.converted).__contains__
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: chosen(name))
    return meant


def torchao_config(engine: Engine, recipe: str | None) -> Any:
    """torchao's configuration of a recipe (``None``: the library's default), emulated where the case is."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name(recipe) if recipe else Float8LinearConfig()
    return replace(config, emulate=engine.case.emulated)
