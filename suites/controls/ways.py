"""General ways to break an arm: its conversion, its layers' products, its loop, its optimizer, its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from controls.control import OF_TENSORS, WAYS, Control, micro, torch
from controls.models import LOOPED

if TYPE_CHECKING:
    from pytest_fp8.backends.base import Conversion
    from pytest_fp8.worker.run.engine import Engine

MIDDLE = "model.layers.1.self_attn.q_proj"
"""The layer that :class:`Products` changes in the micro model."""


class Prepares(Control):
    """``prepares()`` before the arm is built; ``warmed_up()`` when it has made its first steps."""

    def build(self) -> None:
        self.prepares()
        super().build()

    def prepares(self) -> None:
        pass

    def warm_up(self, *given: Any) -> None:
        super().warm_up(*given)
        self.warmed_up()

    def warmed_up(self) -> None:
        pass


class Converts(Prepares):
    """Something else converts the model, by ``by``, or nothing does. What was meant is told as ever."""

    environment = ""
    """What Accelerate's variable asks for meanwhile."""

    def prepares(self) -> None:
        if self.environment:
            os.environ["ACCELERATE_MIXED_PRECISION"] = self.environment

    def convert(self) -> Conversion:
        from pytest_fp8.backends.base import Prepared
        from pytest_fp8.backends.linears import plan

        meant = plan(self.model)
        self.by(self.model)
        self._prepared = Prepared(self.model, meant)
        return meant

    def by(self, model: Any) -> None:
        pass


def torchao_config(engine: Engine, recipe: str | None, **fields: Any) -> Any:
    """torchao's configuration of a recipe (``None``: the library's default), emulated where the case is."""
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name(recipe) if recipe else Float8LinearConfig()
    return replace(config, emulate=engine.case.emulated, **fields)


def by_torchao(engine: Engine, model: Any, takes: Callable[[str], bool] | None = None, **fields: Any) -> None:
    """torchao's own conversion by the case's recipe of the layers that ``takes`` names; by default those that are meant
    to be FP8."""
    from torchao.float8 import convert_to_float8_training

    from pytest_fp8.backends.linears import plan

    chosen = takes or set(plan(model).converted).__contains__
    config = torchao_config(engine, **{"recipe": engine.case.recipe, **fields})
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: chosen(name))


def renew_weights(layers: Iterable[Any]) -> None:
    """Put a new parameter of the same values in place of each of these layers' weights, as ``convert_model`` does."""
    for layer in layers:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())


def on_gradients(of: Callable[[Any], Iterable[Any]], change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """A ``converted`` under which a hook changes the gradients of the tensors that ``of(arm)`` gives."""
    return lambda arm, model: [tensor.register_hook(change) for tensor in of(arm)]


def weights(arm: Any) -> list[Any]:
    """Those of the FP8 layers."""
    return [layer.weight for layer in arm.fp8_layers()]


def plain(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer's product in the precision of its input."""
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def in_e4m3(gradient: torch.Tensor) -> torch.Tensor:
    """Rounded to E4M3 without a scale."""
    return gradient.to(torch.float8_e4m3fn).to(gradient.dtype)


def with_gradients(sources: Iterable[torch.Tensor], value: torch.Tensor, change: Any) -> torch.Tensor:
    """``value``, whose gradient goes to the ``sources`` as the tuple that ``change`` makes of it."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return None, *change(gradient)

    return Changed.apply(value.detach(), *sources)  # type: ignore[no-untyped-call, no-any-return]


def with_gradient(source: torch.Tensor, value: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    return with_gradients((source,), value, lambda gradient: (change(gradient),))


class Forwards(Control):
    """The forward of the FP8 layers, or of ``layers()`` alone, is ``forward(layer, own, x)``; ``own``: its own."""

    def layers(self) -> list[Any]:
        return self.fp8_layers()

    def converted(self, model: Any) -> None:
        for layer in self.layers():
            layer.forward = partial(self.forward, layer, layer.forward)  # type: ignore[attr-defined]


class Products(Forwards):
    """One layer in the middle of the model. The library's own products run; what comes in or out is changed:

    ``input``, ``weight``, ``output_gradient``: what the layer multiplies in place of its own; ``dgrad``: what the layer
    before gets in place of the input's gradient; ``wgrad(dw, x, dy)``: what the weight gets in place of dy^T . x.
    """

    at: int | None = None
    """Which of the FP8 layers; ``None``: the middle one."""
    input = weight = output_gradient = dgrad = staticmethod(lambda tensor: tensor)

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return dw

    def layers(self) -> list[Any]:
        layers = self.fp8_layers()
        return [layers[len(layers) // 2 if self.at is None else self.at]]

    def forward(self, layer: Any, own: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        weight = layer._parameters["weight"]
        gradients: list[torch.Tensor] = []

        def weight_gradient(dw: torch.Tensor) -> torch.Tensor:
            given, dy = x.detach(), gradients.pop()
            return self.wgrad(dw, given.reshape(-1, given.shape[-1]), dy.reshape(-1, dy.shape[-1]))

        def output_gradient(dy: torch.Tensor) -> Any:
            gradients.append(dy)
            return self.output_gradient(dy)

        layer._parameters["weight"] = with_gradient(weight, self.weight(weight), weight_gradient)
        try:
            product = own(with_gradient(x, self.input(x), self.dgrad))
        finally:
            layer._parameters["weight"] = weight
        return with_gradient(product, product, output_gradient)


class Loop(Control):
    """A model with a loop of its own, of which one arm sets something else right after the conversion, as a ``convert``
    may: its ``settings`` (:func:`controls.models.build_looped`)."""

    workload = LOOPED
    case = micro(model="own", steps=3, seeds=1)
    settings: Mapping[str, Any] = {}

    def converted(self, model: Any) -> None:
        vars(model.settings).update(self.settings)


class Draws(Control):
    """Batches of training are those of the seed and the step that ``draws(seed, step)`` gives."""

    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        seed, step = self.draws(seed, step)  # type: ignore[attr-defined]
        return super().training_batch(seed, step, whole)


class Recomputes(Control):
    """Activations are recomputed by torch's checkpointing, with the arguments ``recomputing()``."""

    def checkpoint_activations(self) -> None:
        from pytest_fp8.worker.training.preparation import checkpoint_activations

        checkpoint_activations(self.model, None, self.recomputing())  # type: ignore[attr-defined]


class Patched(Prepares):
    """The function ``patches`` of a library is replaced by ``instead``, which is given it first."""

    patches: str

    def prepares(self) -> None:
        module, _, name = self.patches.rpartition(".")
        own = getattr(import_module(module), name)
        setattr(import_module(module), name, partial(self.instead, own))  # type: ignore[attr-defined]


WAYS.update(
    {
        **dict.fromkeys(OF_TENSORS, Products),
        **dict.fromkeys(("forward", "layers"), Forwards),
        **dict.fromkeys(("by", "environment"), Converts),
        **dict.fromkeys(("prepares", "warmed_up"), Prepares),
        "settings": Loop,
        "draws": Draws,
        "recomputing": Recomputes,
        "instead": Patched,
    }
)
