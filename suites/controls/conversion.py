"""Controls of the conversion: nothing converted, too little, too much, by another recipe or by another library;
and what it does to weights besides."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

from controls.control import control, micro, tiny, torch
from controls.models import ADAPTERS, HOOKED, ROUTER, TWICE
from controls.ways import Loop, by_torchao, renew_weights, torchao_config
from pytest_fp8.codes import L, P


def _prepared_by_the_trainer(arm: Any, model: Any) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, bf16=True, use_cpu=arm.device.type == "cpu", report_to=[])
        trainer: Any = Trainer(model=model, args=arguments)
        arm.model = trainer.accelerator.prepare_model(model)


def _only_the_optimizer(arm: Any, model: Any) -> None:
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs

    accelerator = Accelerator(cpu=arm.device.type == "cpu", mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    accelerator.prepare(arm.setup.optimizer(model))


def _convert_model(arm: Any, model: Any) -> None:
    """The loop of Accelerate's ``convert_model``, which *returns* at a Linear of other sizes: later children of the
    same parent are not converted."""
    from torchao.float8.float8_linear import Float8Linear

    from pytest_fp8.backends.base import ALIGNMENT

    for name, module in model.named_children():
        if isinstance(module, torch.nn.Linear):
            if any(size % ALIGNMENT for size in module.weight.shape):
                return
            setattr(model, name, Float8Linear.from_float(module, config=torchao_config(arm, arm.case.recipe)))
        else:
            _convert_model(arm, module)


def _stored_in_fp8(arm: Any, model: Any) -> None:
    from pytest_fp8.backends.linears import linears

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        kept = layer.weight.detach().to(torch.float8_e4m3fn).to(x.dtype)
        # The gradient goes to the weight.
        return torch.nn.functional.linear(x, kept + layer.weight - layer.weight.detach(), layer.bias)

    for layer in linears(model).values():
        layer.forward = forward.__get__(layer)  # type: ignore[method-assign]


def _by_default(arm: Any, model: Any) -> None:
    by_torchao(arm, model, recipe=None)


def _but(*left: str) -> Any:
    """torchao's conversion of all Linears but those that end so."""
    return lambda arm, model: by_torchao(arm, model, takes=lambda name: not name.endswith(left))


# A plain training loop under the variable: no Accelerator is ever made.
control("env-unread", P.NOTHING_READS_IT, "the environment asks for FP8, nothing was converted")(environment="fp8")
control("trainer-bf16", P.TRAINER_DECIDES, "bf16=True wins over the environment")(
    by=_prepared_by_the_trainer, environment="fp8", needs=("accelerate",)
)
control("model-unprepared", L.NOTHING_CONVERTED, "Accelerate in fp8, the model was never given to it")(
    by=_only_the_optimizer, needs=("accelerate",)
)
control("storage-only", L.NOTHING_CONVERTED, "weights are stored in FP8, and multiplied in BF16")(by=_stored_in_fp8)
# A router of 10 outputs stands first in each MLP.
control("odd-layer-stops", L.NOT_CONVERTED, "a converter stops at the first odd Linear")(by=_convert_model, **ROUTER)
control("second-name", L.UNACCOUNTED, "a Linear of two names is FP8 under one")(by=by_torchao, about="again", **TWICE)
control("recipe-dropped", L.OTHER_RECIPE, "the recipe asked for is dropped")(by=_by_default, case=micro("rowwise"))
control("head-converted", L.LEFT_AND_CONVERTED, "lm_head converted although excluded")(by=_but(), about="lm_head")
control("adapters-converted", L.LEFT_AND_CONVERTED)(by=_but("lm_head"), about="adapter", **ADAPTERS)
control("hook-dropped", L.LOST_BEHAVIOUR, "a Linear's hook is gone once it is converted")(by=by_torchao, **HOOKED)
control("wrong-library", L.OTHER_LIBRARY, "both libraries installed, the wrong one chosen")(
    by=_by_default, precision_context=lambda arm: nullcontext, case=tiny("transformer_engine", "current")
)

# -- weights ----------------------------------------------------------------------------------------------------------


def _past_a_layer(arm: Any, model: Any) -> None:
    block = model.blocks[1]

    def inner(x: torch.Tensor) -> Any:
        hidden = block.drop(block.act(block.up(block.norm(x))))
        return torch.nn.functional.linear(hidden, block.down.weight, block.down.bias)

    block.inner = inner


control("optimizer-too-early", L.NOT_IN_OPTIMIZER, "the optimizer knows the weights from before the conversion")(
    optimizer_made=lambda arm, made: renew_weights(arm.fp8_layers()), question="loss"
)
# The converted weights are new parameters, which take gradients even where the replaced ones took none.
control("base-unfrozen", L.TRAINS_FROZEN, "the base under adapters takes gradients")(
    converted=lambda arm, model: renew_weights(arm.fp8_layers()), **ADAPTERS
)
control("weight-scaled", L.WEIGHT_CHANGED, "the conversion scales a weight by 1.01")(
    Loop, converted=lambda arm, model: model.blocks[0].up.weight.data.mul_(1.01)
)
control("bias-dropped", L.WEIGHT_GONE, "the conversion drops a bias")(
    Loop, converted=lambda arm, model: setattr(model.blocks[1].down, "bias", None)
)
control("layer-bypassed", L.PASSED_BY, "the converted model goes past one of its layers")(Loop, converted=_past_a_layer)
