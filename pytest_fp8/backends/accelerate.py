"""FP8 through Hugging Face Accelerate: ``Accelerator(mixed_precision="fp8")`` over Transformer Engine or torchao.

Users of Accelerate also get BF16 autocast around the forward pass and outputs in float32; both are kept. Options that
Accelerate drops are not restored: the checks read what is in force.
"""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import Backend, Conversion, MakeOptimizer, Prepared
from pytest_fp8.backends.bf16 import Bf16
from pytest_fp8.backends.linears import linears, plan
from pytest_fp8.backends.torchao import TorchAO, torchao_config
from pytest_fp8.backends.transformer_engine import DELAYED, FILLED, TransformerEngine, linear_type
from pytest_fp8.backends.ways import way
from pytest_fp8.recipes import Reason, RecipeFacts, Stays

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

ACCELERATE = {"accelerate": "1.10"}
PARALLEL = ("ddp", "fsdp2", "zero3")
EDGE = "Accelerate leaves the model's {} Linear, for stability"


class ThroughAccelerate(Backend):
    """Accelerate prepares model and optimizer."""

    through_accelerate = True
    mixed_precision = "fp8"

    def import_library(self) -> None:
        import accelerate  # noqa: F401

        super().import_library()

    @abstractmethod
    def planned(self, model: torch.nn.Module, case: Case) -> Conversion:
        """Which Linears Accelerate says it converts."""

    def handlers(self, case: Case) -> list[Any]:
        """Accelerate's objects that name the library and the recipe's options."""
        return []

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case) -> Prepared:
        forget_accelerate()
        given = {"cpu": on_cpu(model), "mixed_precision": self.mixed_precision, "kwargs_handlers": self.handlers(case)}
        made = way(case.parallel).accelerator(**given)
        # Plugins set them for the whole process.
        for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
            os.environ.pop(variable, None)
        return self.prepare_with(made, model, make_optimizer(model), case)

    def prepare_with(
        self, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, case: Case
    ) -> Prepared:
        """``accelerator.prepare(model, optimizer)``, with what it was meant to convert."""
        return way(case.parallel).prepare(accelerator, Prepared(model, self.planned(model, case), optimizer))


class AccelerateBf16(ThroughAccelerate, Bf16):
    """The reference on several GPUs: the plugin and the float32 weights that the FP8 arm has, nothing converted."""

    name = "accelerate_bf16"
    short = "accelerate.bf16"
    requires = ACCELERATE
    parallel = PARALLEL
    reference_on_ranks = "accelerate_bf16"
    mixed_precision = "bf16"

    def planned(self, model: torch.nn.Module, case: Case) -> Conversion:
        return self.convert(model, case)


class AccelerateTransformerEngine(ThroughAccelerate, TransformerEngine):
    """``Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(...)])``. Of Transformer Engine's recipes
    Accelerate offers delayed scaling alone; its default algorithm is "most_recent", where the library's is "max"."""

    name = "accelerate_te"
    short = "accelerate.te"
    library = "transformer_engine"
    recipes: Sequence[RecipeFacts] = (
        RecipeFacts("delayed", options={**DELAYED, "amax_compute_algo": "most_recent"}, calibration_passes=FILLED),
    )
    requires = MappingProxyType({**TransformerEngine.requires, **ACCELERATE})
    parallel: Sequence[str] = ()

    def handlers(self, case: Case) -> list[Any]:
        from accelerate.utils import TERecipeKwargs

        return [TERecipeKwargs(**case.full_options)]

    def planned(self, model: torch.nn.Module, case: Case) -> Conversion:
        """Every Linear of fitting sizes, output projections included. Accelerate does not say that it skips adapters
        and what a workload leaves, and converts them. Here they count as skipped, so that it is reported."""
        return plan(model, heads=True)

    def prepare_with(
        self, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, case: Case
    ) -> Prepared:
        prepared = super().prepare_with(accelerator, model, optimizer, case)
        if case.compile and not self.brings_model:
            keep_out_of_compiled_code(prepared.model)
        return prepared

    def precision(self, case: Case) -> Callable[[], AbstractContextManager[Any]]:
        """None: Accelerate's wrapper around the model's forward opens ``te.autocast`` itself."""
        return nullcontext

    def recompute_function(self) -> Callable[..., Any] | None:
        """None: Accelerate keeps a model's activation checkpointing, which is torch's."""
        return None


class AccelerateTorchAO(ThroughAccelerate, TorchAO):
    """``Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=...)])``."""

    name = "accelerate_torchao"
    short = "accelerate.torchao"
    library = "torchao"
    # Accelerate takes torchao's recipes in a config object; no option of theirs.
    recipes = tuple(replace(facts, switches=()) for facts in TorchAO.recipes)
    requires = MappingProxyType({**TorchAO.requires, **ACCELERATE})
    parallel: Sequence[str] = PARALLEL
    reference_on_ranks = "accelerate_bf16"

    def handlers(self, case: Case) -> list[Any]:
        from accelerate.utils import AORecipeKwargs

        return [AORecipeKwargs(config=torchao_config(case.recipe, case.emulated))]

    def planned(self, model: torch.nn.Module, case: Case) -> Conversion:
        """As over Transformer Engine, without the model's first and last Linear. A head has its usual reason."""
        result, usual = plan(model, heads=True), plan(model).skipped
        every = list(linears(model))
        for name, which in ((every[0], "first"), (every[-1], "last")) if every else ():
            if name in result.converted:
                result.converted.remove(name)
                result.skipped[name] = usual.get(name) or Reason(Stays.EDGE, EDGE.format(which))
        return result


def keep_out_of_compiled_code(model: torch.nn.Module) -> None:
    """Have ``torch.compile`` run the live te.Linear layers as plain Python; :func:`linear_type` gives the reason.

    Accelerate made these layers, so their class is changed in place: one class for all, which is compiled around once.
    """
    import transformer_engine.pytorch as te

    uncompiled = linear_type("delayed")
    for module in model.modules():
        if type(module) is te.Linear:
            # Not by setattr: nn.Module and Transformer Engine override it to look for parameters.
            object.__setattr__(module, "__class__", uncompiled)


def on_cpu(model: torch.nn.Module) -> bool:
    """Whether the model is on the CPU. Accelerate must then be told to stay there, for it may see a GPU."""
    return next(model.parameters()).device.type == "cpu"


# -- what Accelerate keeps for a whole process: its first Accelerator decides the precision of all later ones ----------
#
# Private: Accelerate's own tests reset it by these names. A public way to begin anew would replace them.


def accelerate_precision() -> str:
    """The mixed precision that Accelerate trains in, where this process uses it; else an empty string."""
    state = sys.modules.get("accelerate.state")
    return str(state.AcceleratorState._shared_state.get("_mixed_precision", "")) if state is not None else ""


def forget_accelerate() -> None:
    """Reset Accelerate's state. A process that becomes one arm after another needs each to decide anew."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
