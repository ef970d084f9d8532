"""FP8 through Hugging Face Accelerate: ``Accelerator(mixed_precision="fp8")`` over Transformer Engine or torchao.

Users of Accelerate also get BF16 autocast around the forward pass and outputs in float32; both are kept. Options that
Accelerate drops are not restored: the checks read what is in force.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.accelerate_state import forget_accelerate, make_accelerator
from pytest_fp8.backends.base import Backend, Conversion, MakeOptimizer, Prepared, groups_of
from pytest_fp8.backends.linears import linears, odd_size, plan, reason_to_skip, why_skipped
from pytest_fp8.backends.torchao import TorchAO, torchao_config
from pytest_fp8.backends.transformer_engine import DELAYED, FILLED, TransformerEngine, linear_type
from pytest_fp8.recipes import Reason, RecipeFacts, Stays

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

ACCELERATE = {"accelerate": "1.10"}
# Accelerate's own defaults: its algorithm is "most_recent" where Transformer Engine's is "max".
DELAYED_OF_ACCELERATE = RecipeFacts(
    "delayed", options={**DELAYED, "amax_compute_algo": "most_recent"}, calibration_passes=FILLED
)
"""Of Transformer Engine's recipes Accelerate takes delayed scaling alone."""
EDGE = "Accelerate leaves the model's {} Linear, for stability"


class ThroughAccelerate(Backend):
    """A library's backend with Accelerate above it."""

    through_accelerate = True

    def import_library(self) -> None:
        import accelerate  # noqa: F401

        super().import_library()

    @abstractmethod
    def recipe_handler(self, case: Case) -> Any:
        """Accelerate's object that names the library and the recipe's options."""

    @abstractmethod
    def planned(self, model: torch.nn.Module) -> Conversion:
        """Which Linears Accelerate says it converts."""

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case, compiled: bool) -> Prepared:
        forget_accelerate()
        accelerator = make_accelerator(case.parallel, on_cpu(model), "fp8", [self.recipe_handler(case)])
        return self.prepare_with(accelerator, model, make_optimizer(model), compiled)

    def prepare_with(
        self, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, compiled: bool
    ) -> Prepared:
        """``accelerator.prepare(model, optimizer)``, with what it was meant to convert."""
        return prepared_by(accelerator, model, optimizer, self.planned(model))


def prepared_by(
    accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, conversion: Conversion
) -> Prepared:
    """``accelerator.prepare(model, optimizer)``. Under DDP and DeepSpeed it gives what holds the model."""
    groups = groups_of(optimizer)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if getattr(accelerator, "deepspeed_engine_wrapped", None) is not None:
        # accelerator.backward() would step, too: between these two calls of its, gradients are read here.
        return Prepared(model, conversion, backward=prepared.backward, wrapped=prepared, groups=groups)
    inner = accelerator.unwrap_model(prepared, keep_torch_compile=True)
    wrapped = prepared if inner is not prepared else None
    return Prepared(inner, conversion, optimizer, backward=accelerator.backward, wrapped=wrapped)


class AccelerateTransformerEngine(ThroughAccelerate, TransformerEngine):
    """``Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(...)])``. Of Transformer Engine's recipes
    Accelerate offers delayed scaling alone."""

    name = "accelerate_te"
    short = "accelerate.te"
    library = "transformer_engine"
    recipes: Sequence[RecipeFacts] = (DELAYED_OF_ACCELERATE,)
    requires = MappingProxyType({**TransformerEngine.requires, **ACCELERATE})
    parallel: Sequence[str] = ()
    over_bf16 = 1.29  # the same measurement, of Transformer Engine's own backend

    def recipe_handler(self, case: Case) -> Any:
        from accelerate.utils import TERecipeKwargs

        return TERecipeKwargs(**case.full_options)

    def planned(self, model: torch.nn.Module) -> Conversion:
        return plan_for_te(model)

    def prepare_with(
        self, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, compiled: bool
    ) -> Prepared:
        prepared = super().prepare_with(accelerator, model, optimizer, compiled)
        if compiled:
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
    parallel: Sequence[str] = ("ddp", "fsdp2", "zero3")
    reference_on_ranks = "accelerate_bf16"  # Accelerate keeps float32 weights there

    def recipe_handler(self, case: Case) -> Any:
        from accelerate.utils import AORecipeKwargs

        return AORecipeKwargs(config=torchao_config(case.recipe, case.emulated))

    def planned(self, model: torch.nn.Module) -> Conversion:
        return plan_for_torchao(model)


# -- what Accelerate converts -----------------------------------------------------------------------------------------


def plan_for_te(model: torch.nn.Module) -> Conversion:
    """Over Transformer Engine: every Linear of fitting sizes, output projections included.

    Accelerate does not say that it skips adapters, and converts them. Here they count as skipped, so that their
    conversion is reported.
    """
    return plan(model, _why_skipped)


def plan_for_torchao(model: torch.nn.Module) -> Conversion:
    """Over torchao: the same, without the model's first and last Linear."""
    result = plan_for_te(model)
    every = list(linears(model))
    for name, which in ((every[0], "first"), (every[-1], "last")) if every else ():
        if name in result.converted:
            result.converted.remove(name)
            # A head has the reason that it has with every backend.
            result.skipped[name] = reason_to_skip(name, 0, 0) or Reason(Stays.EDGE, EDGE.format(which))
    return result


def _why_skipped(name: str, linear: torch.nn.Linear) -> Reason | None:
    """Why a Linear is skipped, or ``None``. A head has none but its sizes. A Linear that the workload leaves
    counts as skipped: Accelerate's conversion takes no names, converts it all the same, and that is reported."""
    reason = why_skipped(name, linear)
    if reason is not None and reason.kind is Stays.HEAD:
        return odd_size(linear.in_features, linear.out_features)
    return reason


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
