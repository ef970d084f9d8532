"""Controls of the conversion: nothing converted, too little, too much, by another recipe or by another library."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from controls.control import ACCELERATE, TORCHAO, TRANSFORMERS, Control, micro, tiny
from controls.models import ADAPTERS, HOOKED, ROUTER
from pytest_fp8.backends.base import ALIGNMENT
from pytest_fp8.backends.linears import plan
from pytest_fp8.codes import L, P

if TYPE_CHECKING:
    import torch

    from pytest_fp8.backends.base import Conversion
    from pytest_fp8.worker.run.engine import Engine

MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
FILTER = f"[torchao, module_filter_fn]({TORCHAO}/blob/main/torchao/float8/float8_linear_utils.py)"


class NothingReadsTheEnvironment(Control):
    """``ACCELERATE_MIXED_PRECISION=fp8`` around a plain training loop: no Accelerator is ever made."""

    number, id = 1, "env-unread"
    title = "the environment asks for FP8, nothing was converted"
    source = "report: full fine-tuning of 8B at 0.82x, environment variables that nobody read"
    question = "layers"
    code = P.NOTHING_READS_IT
    case = micro()

    def build(self) -> None:
        os.environ[MIXED_PRECISION] = "fp8"
        super().build()

    def convert(self) -> Conversion:
        return plan(self.model)


class TrainerBf16Wins(Control):
    """transformers' own ``Trainer(bf16=True)`` under ``ACCELERATE_MIXED_PRECISION=fp8``."""

    number, id = 2, "trainer-bf16"
    nightly = True
    title = "bf16=True wins over the environment"
    source = f"[transformers, TrainingArguments]({TRANSFORMERS}/training_args.py)"
    question = "layers"
    code = P.TRAINER_DECIDES
    case = micro()
    needs = ("accelerate",)

    def build(self) -> None:
        os.environ[MIXED_PRECISION] = "fp8"
        super().build()

    def convert(self) -> Conversion:
        from transformers import Trainer, TrainingArguments

        meant = plan(self.model)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(output_dir=folder, bf16=True, use_cpu=self.device.type == "cpu", report_to=[])
            trainer: Any = Trainer(model=self.model, args=arguments)
            self.model = trainer.accelerator.prepare_model(self.model)
        return meant


class StopsAtTheFirstOddLayer(Control):
    """The loop of Accelerate's ``convert_model``, with a router of 10 outputs in each MLP. The loop *returns* at a
    Linear whose sizes are not multiples of 16, so the later children of the same parent are not converted."""

    number, id = 3, "odd-layer-stops"
    title = "a converter stops at the first odd Linear"
    source = f"[Accelerate, convert_model]({ACCELERATE}/utils/transformer_engine.py)"
    question = "layers"
    code = L.NOT_CONVERTED
    case = micro(model="own")
    workload = ROUTER

    def convert(self) -> Conversion:
        meant = plan(self.model)
        _convert_model(self.model, torchao_config(self, self.case.recipe))
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


class RecipeDropped(Control):
    """``rowwise`` is asked for and never reaches the library, which converts by its default."""

    number, id = 8, "recipe-dropped"
    title = "the recipe asked for is dropped"
    source = f"[Accelerate's DeepSpeed path ignores the recipe handler]({ACCELERATE}/accelerator.py)"
    question = "layers"
    code = L.OTHER_RECIPE
    case = micro("rowwise")

    def convert(self) -> Conversion:
        return _by_torchao(self.model, torchao_config(self, None))


class HeadConverted(Control):
    """No filter is passed: every Linear is converted, the output projection included."""

    number, id = 23, "head-converted"
    title = "lm_head converted although excluded"
    source = FILTER
    question = "layers"
    code = L.LEFT_AND_CONVERTED
    about = "lm_head"
    case = micro()

    def convert(self) -> Conversion:
        from torchao.float8 import convert_to_float8_training

        meant = plan(self.model)
        convert_to_float8_training(self.model, config=torchao_config(self, self.case.recipe))
        return meant


class AdaptersConverted(Control):
    """peft's adapters are in the model, and the filter knows ``lm_head`` alone: the adapters are converted, too."""

    number, id = 24, "adapters-converted"
    nightly = True
    title = "LoRA adapters converted"
    source = FILTER
    question = "layers"
    code = L.LEFT_AND_CONVERTED
    about = "adapter"
    case = micro(model="own")
    workload = ADAPTERS
    needs = ("peft",)

    def convert(self) -> Conversion:
        config = torchao_config(self, self.case.recipe)
        return _by_torchao(self.model, config, takes=lambda name: not name.endswith("lm_head"))


class OtherLibraryChosen(Control):
    """Transformer Engine was meant; torchao, installed beside it, converts the model."""

    number, id = 27, "wrong-library"
    title = "both libraries installed, the wrong one chosen"
    source = f"[Accelerate's choice of FP8 backend]({ACCELERATE}/accelerator.py)"
    question = "layers"
    code = L.OTHER_LIBRARY
    case = tiny("transformer_engine", "current")

    def convert(self) -> Conversion:
        return _by_torchao(self.model, None)

    def precision_context(self) -> Callable[[], Any]:
        return nullcontext


class HookDropped(Control):
    """torchao's own conversion of a model that weighs a branch by a forward hook: the new module has no hook."""

    number, id = 35, "hook-dropped"
    title = "what a hook does with a Linear's output is gone after the conversion"
    source = f"[torchao, Float8Linear.from_float]({TORCHAO}/blob/main/torchao/float8/float8_linear.py)"
    question = "layers"
    code = L.LOST_BEHAVIOUR
    case = micro(model="own")
    workload = HOOKED

    def convert(self) -> Conversion:
        return _by_torchao(self.model, torchao_config(self, self.case.recipe))


def _by_torchao(model: torch.nn.Module, config: Any, takes: Callable[[str], bool] | None = None) -> Conversion:
    """Convert the layers that ``takes`` names by torchao's own function; by default those that are meant to be FP8.

    ``config=None`` takes torchao's defaults. Returns what was meant in any case.
    """
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
