"""Controls of the conversion: nothing converted, too little, too much, by another recipe or by another library;
and what it does to weights besides."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

from controls.control import ACCELERATE, TORCHAO, TRANSFORMERS, micro, tiny, torch
from controls.models import ADAPTERS, HOOKED, ROUTER, TWICE
from controls.ways import Loop, by_torchao, fault, renew_weights, torchao_config
from pytest_fp8.codes import L, P

FILTER = f"[torchao, module_filter_fn]({TORCHAO}/blob/main/torchao/float8/float8_linear_utils.py)"
TRANSFORMER_ENGINE = f"{ACCELERATE}/utils/transformer_engine.py"

# A plain training loop under the variable: no Accelerator is ever made.
fault(
    "env-unread",
    P.NOTHING_READS_IT,
    "the environment asks for FP8, nothing was converted",
    source="report: full fine-tuning of 8B at 0.82x, environment variables that nobody read",
    environment="fp8",
)


def _prepared_by_the_trainer(arm: Any, model: Any) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, bf16=True, use_cpu=arm.device.type == "cpu", report_to=[])
        trainer: Any = Trainer(model=model, args=arguments)
        arm.model = trainer.accelerator.prepare_model(model)


fault(
    "trainer-bf16",
    P.TRAINER_DECIDES,
    "bf16=True wins over the environment",
    source=f"[transformers, TrainingArguments]({TRANSFORMERS}/training_args.py)",
    environment="fp8",
    by=_prepared_by_the_trainer,
    needs=("accelerate",),
)


def _only_the_optimizer(arm: Any, model: Any) -> None:
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs

    accelerator = Accelerator(cpu=arm.device.type == "cpu", mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    accelerator.prepare(arm.setup.optimizer(model))


fault(
    "model-unprepared",
    L.NOTHING_CONVERTED,
    "Accelerate trains in fp8, the model was never given to it",
    source=f"[Accelerate, Accelerator.prepare]({ACCELERATE}/accelerator.py)",
    by=_only_the_optimizer,
    needs=("accelerate",),
)


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


# A router of 10 outputs stands first in each MLP.
fault(
    "odd-layer-stops",
    L.NOT_CONVERTED,
    "a converter stops at the first odd Linear",
    source=f"[Accelerate, convert_model]({TRANSFORMER_ENGINE})",
    by=_convert_model,
    **ROUTER,
)
fault(
    "second-name",
    L.UNACCOUNTED,
    "a Linear under two names becomes an FP8 layer under the first alone",
    source=f"[torchao, swap_linear_layers]({TORCHAO}/blob/main/torchao/float8/float8_linear_utils.py)",
    about="again",
    by=lambda arm, model: by_torchao(arm, arm.case.recipe),
    **TWICE,
)


def _stored_in_fp8(arm: Any, model: Any) -> None:
    from pytest_fp8.backends.linears import linears

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        kept = layer.weight.detach().to(torch.float8_e4m3fn).to(x.dtype)
        # The gradient goes to the weight.
        return torch.nn.functional.linear(x, kept + layer.weight - layer.weight.detach(), layer.bias)

    for layer in linears(model).values():
        layer.forward = forward.__get__(layer)  # type: ignore[method-assign]


fault(
    "storage-only",
    L.NOTHING_CONVERTED,
    "weights are stored in FP8, and multiplied in BF16",
    by=_stored_in_fp8,
)
fault(
    "recipe-dropped",
    L.OTHER_RECIPE,
    "the recipe asked for is dropped",
    source=f"[Accelerate's DeepSpeed path ignores the recipe handler]({ACCELERATE}/accelerator.py)",
    by=lambda arm, model: by_torchao(arm, None),
    case=micro("rowwise"),
)
fault(
    "head-converted",
    L.LEFT_AND_CONVERTED,
    "lm_head converted although excluded",
    source=FILTER,
    about="lm_head",
    by=lambda arm, model: by_torchao(arm, arm.case.recipe, takes=lambda name: True),
)
fault(
    "adapters-converted",
    L.LEFT_AND_CONVERTED,
    "LoRA adapters converted",
    source=FILTER,
    about="adapter",
    by=lambda arm, model: by_torchao(arm, arm.case.recipe, takes=lambda name: not name.endswith("lm_head")),
    **ADAPTERS,
)
fault(
    "wrong-library",
    L.OTHER_LIBRARY,
    "both libraries installed, the wrong one chosen",
    source=f"[Accelerate's choice of FP8 backend]({ACCELERATE}/accelerator.py)",
    by=lambda arm, model: by_torchao(arm, None),
    precision_context=lambda arm: nullcontext,
    case=tiny("transformer_engine", "current"),
)
fault(
    "hook-dropped",
    L.LOST_BEHAVIOUR,
    "what a hook does with a Linear's output is gone after the conversion",
    source=f"[torchao, Float8Linear.from_float]({TORCHAO}/blob/main/torchao/float8/float8_linear.py)",
    by=lambda arm, model: by_torchao(arm, arm.case.recipe),
    **HOOKED,
)


fault(
    "optimizer-too-early",
    L.NOT_IN_OPTIMIZER,
    "the optimizer knows the weights from before the conversion",
    source=f"[Accelerate, AORecipeKwargs]({ACCELERATE}/utils/dataclasses.py)",
    optimizer_made=lambda arm, made: renew_weights(arm.fp8_layers()),
    question="loss",
)
# The converted weights are new parameters, which take gradients even where the replaced ones took none.
fault(
    "base-unfrozen",
    L.TRAINS_FROZEN,
    "the frozen base under adapters takes gradients again",
    source=f"[Accelerate, convert_model]({TRANSFORMER_ENGINE})",
    converted=lambda arm, model: renew_weights(arm.fp8_layers()),
    **ADAPTERS,
)


def _weight_scaled(arm: Any, model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(1.01)


fault("weight-scaled", L.WEIGHT_CHANGED, "the conversion scales a weight by 1.01", Loop, converted=_weight_scaled)
fault(
    "bias-dropped",
    L.WEIGHT_GONE,
    "the conversion drops a bias",
    Loop,
    converted=lambda arm, model: setattr(model.blocks[1].down, "bias", None),
)


def _past_a_layer(arm: Any, model: Any) -> None:
    block = model.blocks[1]

    def inner(x: torch.Tensor) -> Any:
        hidden = block.drop(block.act(block.up(block.norm(x))))
        return torch.nn.functional.linear(hidden, block.down.weight, block.down.bias)

    block.inner = inner


fault("layer-bypassed", L.PASSED_BY, "the converted model goes past one of its layers", Loop, converted=_past_a_layer)
