"""General ways to break an arm: its conversion, its layers' products, its loop, its optimizer, its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
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
        """Convert the model; ``self.model`` may become another one."""


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


def on_gradients(tensors: Iterable[Any], change: Callable[[torch.Tensor], Any]) -> None:
    """Have a hook change each of these tensors' gradients."""
    for tensor in tensors:
        tensor.register_hook(change)


def plain(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer's product in the precision of its input."""
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def through_e4m3(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to scaled E4M3, as float32."""
    scale = 448 / tensor.abs().max().float().clamp(min=1e-12)
    return (tensor.float() * scale).to(torch.float8_e4m3fn).float() / scale


class Forwards(Control):
    """The FP8 layers' forward is ``forward``; those of ``layers()`` alone."""

    def layers(self) -> list[Any]:
        return self.fp8_layers()

    def forward(self, layer: Any, own: Callable[[Any], Any], x: torch.Tensor) -> Any:
        """What the layer gives for ``x``; ``own`` is its own forward."""
        return own(x)

    def converted(self, model: Any) -> None:
        def changed(layer: Any, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda x: self.forward(layer, own, x)

        for layer in self.layers():
            layer.forward = changed(layer, layer.forward)


class Products(Control):
    """One layer in the middle of the model. The library's own products run; what comes in or out is changed."""

    at: int | None = None
    """Which of the FP8 layers; ``None``: the middle one."""

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer multiplies in place of its input."""
        return x

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """What the layer multiplies in place of its weight."""
        return weight

    def output_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """What the layer multiplies in place of its output's gradient."""
        return dy

    def dgrad(self, dx: torch.Tensor) -> torch.Tensor:
        """What the layer before gets in place of the input's gradient."""
        return dx

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """What the weight gets in place of its gradient, which is dy^T . x."""
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

        def output_gradient(dy: torch.Tensor) -> torch.Tensor:
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


class Optimizers(Control):
    """The optimizer is changed once it is made."""

    def optimizer_made(self, optimizer: Any) -> None:
        """Change it in place."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        made = super().make_optimizer()
        self.optimizer_made(made)
        return made


WAYS: dict[str, type[Control]] = {
    **dict.fromkeys(("input", "weight", "output_gradient", "dgrad", "wgrad"), Products),
    **dict.fromkeys(("forward", "layers"), Forwards),
    **dict.fromkeys(("by", "environment"), Converts),
    "does": Loop,
    "optimizer_made": Optimizers,
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
