"""FP8 through Hugging Face Accelerate: ``Accelerator(mixed_precision="fp8")`` over Transformer Engine or torchao.

What Accelerate adds is kept, for it is what its users get: BF16 autocast around the forward pass, outputs in float32.
What it drops is not put back either; the checks read what is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import (
    Backend,
    Conversion,
    Prepared,
    installed,
    linears,
    odd_size,
    plan,
    reason_to_skip,
    ties,
    why_skipped,
)
from pytest_fp8.backends.torchao import TorchAO
from pytest_fp8.backends.transformer_engine import TransformerEngine, linear_type
from pytest_fp8.worker.preparation import forget_accelerate

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

MINIMUM = "1.10"
EDGE = "edge: Accelerate leaves the model's {} Linear, for stability"


class ThroughAccelerate(Backend):
    """A library's backend with Accelerate above it: both must be there, and Accelerate's state stays in the process."""

    keeps_state = True

    def available(self) -> tuple[bool, str]:
        there, what = super().available()
        if not there:
            return there, what
        accelerate, said = installed("accelerate", MINIMUM)
        return accelerate, f"{said} over {what}" if accelerate else said

    def import_library(self) -> None:
        import accelerate  # noqa: F401

        super().import_library()


class AccelerateTransformerEngine(ThroughAccelerate, TransformerEngine):
    """``Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(...)])``; of Transformer Engine's recipes
    only delayed scaling is offered here."""

    name = "accelerate_te"

    def prepare(
        self,
        model: torch.nn.Module,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        case: Case,
        compiled: bool,
    ) -> Prepared:
        from accelerate import Accelerator
        from accelerate.utils import TERecipeKwargs

        forget_accelerate()
        accelerator = Accelerator(
            cpu=on_cpu(model), mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**case.full_options)]
        )
        return prepare_te(accelerator, model, make_optimizer(model), compiled)

    def precision(self, recipe: str, options: Mapping[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
        """Accelerate's wrapper around the model's forward opens the context itself."""
        return nullcontext

    def recompute(self) -> Callable[..., Any] | None:
        """Accelerate leaves a model's activation checkpointing as it is: torch's."""
        return None


class AccelerateTorchAO(ThroughAccelerate, TorchAO):
    """``Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=...)])``."""

    name = "accelerate_torchao"

    def prepare(
        self,
        model: torch.nn.Module,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        case: Case,
        compiled: bool,
    ) -> Prepared:
        from dataclasses import replace

        from accelerate import Accelerator
        from accelerate.utils import AORecipeKwargs
        from torchao.float8 import Float8LinearConfig

        forget_accelerate()
        config = replace(Float8LinearConfig.from_recipe_name(case.recipe), emulate=case.emulated)
        accelerator = Accelerator(
            cpu=on_cpu(model), mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config)]
        )
        return prepare_torchao(accelerator, model, make_optimizer(model))


# -- what both roads through Accelerate do ----------------------------------------------------------------------------


def prepare_through(
    accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, meant: Conversion
) -> Prepared:
    """``accelerator.prepare``, with what it was ``meant`` to convert and the ties that it broke."""
    tied = ties(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    meant.untied = broken(tied, model)
    return Prepared(model, meant, optimizer, backward=accelerator.backward)


def prepare_te(accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, compiled: bool) -> Prepared:
    """Through Accelerate over Transformer Engine."""
    prepared = prepare_through(accelerator, model, optimizer, meant_for_te(model))
    if compiled:
        step_around(prepared.model)
    return prepared


def prepare_torchao(accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """Through Accelerate over torchao."""
    return prepare_through(accelerator, model, optimizer, meant_for_torchao(model))


def meant_for_te(model: torch.nn.Module) -> Conversion:
    """Accelerate gives Transformer Engine every Linear of fitting sizes, output projections included. Adapters have no
    place there; they count as left, so that converting them is found."""
    return plan(model, _reason)


def meant_for_torchao(model: torch.nn.Module) -> Conversion:
    """The same for torchao, which is not given the model's first and last Linear."""
    result = meant_for_te(model)
    every = list(linears(model))
    # A head keeps the reason that it has everywhere.
    for name, which in ((every[0], "first"), (every[-1], "last")) if every else ():
        if name in result.converted:
            result.converted.remove(name)
            result.skipped[name] = reason_to_skip(name, 0, 0) or EDGE.format(which)
    return result


def _reason(name: str, linear: torch.nn.Linear) -> str:
    """Why this Linear is to stay. A Linear that the workload leaves is one: Accelerate's conversion takes no names, and
    converting it all the same is found."""
    reason = why_skipped(name, linear)
    return odd_size(linear.in_features, linear.out_features) if reason.startswith("head") else reason


def broken(tied: Mapping[str, str], model: torch.nn.Module) -> dict[str, str]:
    """Those of the ties that a conversion broke. ``convert_model`` copies weights into new layers: a tied head becomes
    a weight of its own, which the optimizer that was made before does not know."""
    live = dict(model.named_parameters(remove_duplicate=False))
    return {name: first for name, first in tied.items() if live.get(name) is not live.get(first)}


def step_around(model: torch.nn.Module) -> None:
    """Have ``torch.compile`` step around the live te.Linear layers, as :func:`linear_type` says why.

    Accelerate made them, so their class is changed where they stand: one class for all, compiled around once.
    """
    import transformer_engine.pytorch as te

    stepped = linear_type("delayed")
    for module in model.modules():
        if type(module) is te.Linear:
            # Past nn.Module's __setattr__, which looks for parameters, and Transformer Engine's own.
            object.__setattr__(module, "__class__", stepped)


def on_cpu(model: torch.nn.Module) -> bool:
    """Whether Accelerate must be told to stay on the CPU, where the model is, although it may see a GPU."""
    return next(model.parameters()).device.type == "cpu"
