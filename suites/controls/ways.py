"""General ways to break an arm: its conversion, its layers' products, its loop, its optimizer, its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from controls.control import Control, control, micro, torch
from controls.models import LOOPED

if TYPE_CHECKING:
    from pytest_fp8.backends.base import Conversion
    from pytest_fp8.codes import Code
    from pytest_fp8.worker.run.engine import Engine

MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
MIDDLE = "model.layers.1.self_attn.q_proj"
"""The layer that :class:`Products` changes in the micro model."""


class Converts(Control):
    """Something else converts the model, by ``by``, or nothing does. What was meant is told as ever."""

    environment = ""
    """What Accelerate's variable asks for meanwhile."""

    def build(self) -> None:
        if self.environment:
            os.environ[MIXED_PRECISION] = self.environment
        super().build()

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


def by_torchao(engine: Engine, recipe: str | None, takes: Callable[[str], bool] | None = None, **fields: Any) -> None:
    """torchao's own conversion of the layers that ``takes`` names; by default those that are meant to be FP8."""
    from torchao.float8 import convert_to_float8_training

    from pytest_fp8.backends.linears import plan

    chosen = takes or set(plan(engine.model).converted).__contains__
    config = torchao_config(engine, recipe, **fields)
    convert_to_float8_training(engine.model, config=config, module_filter_fn=lambda _, name: chosen(name))


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


def through_e4m3(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to scaled E4M3, as float32."""
    scale = 448 / tensor.abs().max().float().clamp(min=1e-12)
    return (tensor.float() * scale).to(torch.float8_e4m3fn).float() / scale


class Forwards(Control):
    """The forward of the FP8 layers, or of ``layers()`` alone, is ``forward(layer, own, x)``; ``own``: its own."""

    def layers(self) -> list[Any]:
        return self.fp8_layers()

    def converted(self, model: Any) -> None:
        for layer in self.layers():
            layer.forward = partial(self.forward, layer, layer.forward)  # type: ignore[attr-defined]


class Products(Control):
    """One layer in the middle of the model. The library's own products run; what comes in or out is changed:

    ``input``, ``weight``, ``output_gradient``: what the layer multiplies in place of its own; ``dgrad``: what the layer
    before gets in place of the input's gradient; ``wgrad(dw, x, dy)``: what the weight gets in place of dy^T . x.
    """

    at: int | None = None
    """Which of the FP8 layers; ``None``: the middle one."""
    input = weight = output_gradient = dgrad = staticmethod(lambda tensor: tensor)

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return dw

    def converted(self, model: Any) -> None:
        self._given: list[torch.Tensor] = []
        self._dy: list[torch.Tensor] = []
        layers = self.fp8_layers()
        layer = layers[len(layers) // 2 if self.at is None else self.at]
        layer.forward = self._forward(layer)

    def _forward(self, layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        own = layer.forward

        def weight_gradient(dw: torch.Tensor) -> torch.Tensor:
            x, dy = self._given.pop(), self._dy.pop()
            return self.wgrad(dw, x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))

        def output_gradient(dy: torch.Tensor) -> Any:
            self._dy[:] = [dy]
            return self.output_gradient(dy)

        def forward(x: torch.Tensor) -> torch.Tensor:
            self._given[:] = [x.detach()]
            weight = layer._parameters["weight"]
            layer._parameters["weight"] = with_gradient(weight, self.weight(weight), weight_gradient)
            try:
                product = own(with_gradient(x, self.input(x), self.dgrad))
            finally:
                layer._parameters["weight"] = weight
            return with_gradient(product, product, output_gradient)

        return forward


def with_gradient(source: torch.Tensor, value: torch.Tensor, change: Any) -> torch.Tensor:
    """``value``, whose gradient goes to ``source`` after ``change``."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return value.detach().view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return change(gradient), None

    return Changed.apply(source, value.detach())  # type: ignore[no-untyped-call, no-any-return]


class Loop(Control):
    """A model with a loop of its own, which one arm changes right after the conversion, as a ``convert`` may.

    ``does`` names what the loop does in this arm alone (:func:`controls.models.looped`).
    """

    workload = LOOPED
    case = micro(model="own", steps=3, seeds=1)
    does = ""

    def converted(self, model: Any) -> None:
        model.does = self.does


class Patched(Control):
    """The function ``patches`` of a library is replaced by ``instead``, which is given it first."""

    patches: str

    def build(self) -> None:
        module, _, name = self.patches.rpartition(".")
        own = getattr(import_module(module), name)
        setattr(import_module(module), name, partial(self.instead, own))  # type: ignore[attr-defined]
        super().build()


WAYS: dict[str, type[Control]] = {
    **dict.fromkeys(("input", "weight", "output_gradient", "dgrad", "wgrad"), Products),
    **dict.fromkeys(("forward", "layers"), Forwards),
    **dict.fromkeys(("by", "environment"), Converts),
    "does": Loop,
    "instead": Patched,
}
"""What a row states -> the way that it is."""


def fault(id: str, code: Code, title: str = "", way: type[Control] | None = None, **stated: Any) -> type[Control]:
    """One row of the catalogue: a way to break an arm, with these attributes, and these functions as its methods.

    ``way`` follows from what is stated (:data:`WAYS`). Functions are given the arm first, but for those of
    :class:`Products`, which change a tensor.
    """
    way = way or next((WAYS[name] for name in stated if name in WAYS), Control)
    methods = {name: staticmethod(value) if WAYS.get(name) is Products else value for name, value in stated.items()}
    return control(id, code, title, **methods)(type(id, (way,), {}))
