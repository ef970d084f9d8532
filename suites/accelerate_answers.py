"""Asks Accelerate what it does, in a process of its own: ``python accelerate_answers.py`` prints one JSON object.

Where Transformer Engine is not installed, a module whose te.Linear is an nn.Linear stands in. The questions are about
Accelerate's own Python code, its loop and its arguments; no layer of Transformer Engine multiplies anything.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch
from torch import nn

PRECISION = "ACCELERATE_MIXED_PRECISION"


def stand_in():
    package, module = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")

    class Linear(nn.Linear):
        def __init__(self, inputs, outputs, bias=True, params_dtype=None):
            super().__init__(inputs, outputs, bias=bias, dtype=params_dtype)

    class LayerNorm(nn.LayerNorm): ...

    module.Linear, module.LayerNorm, module.TransformerLayer = Linear, LayerNorm, LayerNorm
    package.pytorch = module
    sys.modules |= {"transformer_engine": package, "transformer_engine.pytorch": module}
    for name in ("accelerate.utils.dataclasses", "accelerate.utils.transformer_engine", "accelerate.accelerator"):
        importlib.import_module(name).is_transformer_engine_available = lambda: True


def tied():
    model = nn.ModuleDict({"embed": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def launched():
    """The precision that a program finds in its environment which ``accelerate launch`` starts without a config file,
    under ACCELERATE_MIXED_PRECISION=fp8."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(f"import os; print(os.environ[{PRECISION!r}])")
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", str(program)]
        environment = {**os.environ, "HF_HOME": folder, PRECISION: "fp8"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()[-1]


def trained():
    """What a Trainer trains in whose own argument is bf16, under ACCELERATE_MIXED_PRECISION=fp8."""
    from transformers import Trainer, TrainingArguments

    from pytest_fp8.backends.accelerate import forget_accelerate

    os.environ[PRECISION] = "fp8"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, bf16=True, use_cpu=True, report_to=[])
        used = Trainer(model=nn.Linear(16, 16), args=arguments).accelerator.mixed_precision
    del os.environ[PRECISION]
    forget_accelerate()
    return used


def main():
    from accelerate import Accelerator

    precisions = {"launched": launched(), "trainer": trained()}
    if importlib.util.find_spec("transformer_engine") is None:
        stand_in()
    import transformer_engine.pytorch as te
    from accelerate.utils import TERecipeKwargs
    from accelerate.utils.dataclasses import FP8BackendType
    from accelerate.utils.transformer_engine import convert_model

    Accelerator(cpu=True)  # convert_model asks for the process's state
    row = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10), nn.Linear(32, 32))
    head = tied()
    base = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    with torch.no_grad():
        convert_model(row)
        convert_model(head)
        convert_model(base)
    try:
        lower = FP8BackendType("te").value
    except ValueError as error:
        lower = str(error)
    answers = {
        "most_recent": TERecipeKwargs(amax_compute_algo="most_recent").to_kwargs().get("amax_compute_algo", "dropped"),
        "converted": [isinstance(layer, te.Linear) for layer in row],
        "tied": head["head"].weight is head["embed"].weight,
        "frozen": not any(parameter.requires_grad for parameter in base.parameters()),
        "te": lower,
        **precisions,
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
