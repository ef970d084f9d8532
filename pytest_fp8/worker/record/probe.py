"""Watches the calls of layers: what each is given, multiplies by and gives, and the gradients that come back.

A subclass of :class:`Probe` makes of them what its question needs: :class:`ProductChecks` compares samples of the
products with the exact ones, and :class:`StepLooks` looks at a few values in each step of a curve.
"""

from __future__ import annotations

import math
import random
import threading
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.casts import E4M3, GRADIENT, INPUT, LINE, SQUARE, TENSOR, WEIGHT, Cast, Casts, promised_casts
from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.questions.loss.evidence import LayerCalls, Look
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD, Role
from pytest_fp8.worker.record.accuracy import (
    Expected,
    Operand,
    decibels,
    is_fp8_code,
    is_product,
    kept_numbers,
    square_amax,
)
from pytest_fp8.worker.tensors import Sharded, held, is_plain, unwatched
from pytest_fp8.worker.training.restored import Hook, followed, hooked
from pytest_fp8.worker.training.step import closure_of, on_steps

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

# -- the probe --------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call of a layer, while it runs and until its gradients have come."""

    name: str
    layer: torch.nn.Module
    weight: torch.nn.Parameter | None
    began: int
    """Autograd's number of the next node when the call began."""
    x: torch.Tensor | None = None
    """The first tensor that the layer was given. Like ``view`` only while the call runs: what autograd saves holds the
    layer's input, and this record must not."""
    view: Any = None
    """What stands in the weight's place, where gradients are watched."""
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the layer multiplied its input and weight by, where it knew that before."""

    def operands(self, output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Input and output as matrices, weight and bias, detached; ``None`` where the output is not their product."""
        x, weight = self.x, self.weight
        if x is None or weight is None or type(output) is not torch.Tensor:
            return None
        if x.is_nested or output.is_nested or not (x.numel() and output.numel() and x.dim() and output.dim()):
            return None
        if (x.shape[-1], output.shape[-1]) != (weight.shape[1], weight.shape[0]):
            return None
        bias = self.layer._parameters.get("bias")
        added = bias.detach() if bias is not None and bias.numel() else None
        return rows_of(x), weight.detach(), rows_of(output), added


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of :meth:`Call.operands`."""


class Probe:
    """An observer of a step (:class:`pytest_fp8.worker.answers.recorded.Observer`): hooks on layers."""

    views = False
    """Whether a layer's input and weight are handed to it as views, whose gradients are this call's own: not the sum
    over the layers that share an input, nor over the calls of a layer, nor with a penalty on the weight."""

    def __init__(self, layers: Mapping[str, torch.nn.Module], device: torch.device) -> None:
        self.layers = layers
        # Drawn once for each size: copying a draw to a GPU in each call would make the host wait.
        self.lines = cache(partial(drawn_lines, device))
        self.phase = ""
        self._open = defaultdict[int, list[Call]](list)
        """Thread -> its calls that run: a model may call its branches side by side."""

    def handles(self) -> list[Any]:
        """Watch from now on; of the hooks that are registered for it."""
        handles = followed(self.layers.values()) if self.views else []
        for name, layer in self.layers.items():
            handles.append(layer.register_forward_pre_hook(Hook(self._entered(name)), with_kwargs=True))
            # Products are compared before other hooks, which may change the output. Always, because an early end of a
            # recomputation is an exception, and the weight must be put back.
            handles.append(layer.register_forward_hook(Hook(self._left), prepend=True, always_call=True))
        return handles

    @contextmanager
    def watching(self) -> Iterator[None]:
        with hooked(self.handles()):
            yield

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        outer, self.phase = self.phase, name
        yield
        self.phase = outer

    def called(self, call: Call, output: Any) -> None:
        """A layer was called; ``output`` is ``None`` where that raised. Runs with the gradient mode and the dispatch
        modes of the call."""
        raise NotImplementedError

    def _entered(self, name: str) -> Callable[..., Any]:
        def entered(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # What the user compiled may be traced here, and runs without hooks afterwards.
            if torch.compiler.is_compiling():
                return None
            # The sequence number says which nodes of the graph this call makes; a public one would take its place.
            call = Call(name, layer, layer._parameters.get("weight"), torch.autograd._get_sequence_nr())
            call.x = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            self._open[threading.get_ident()].append(call)
            return _with_views(call, args, kwargs) if self.views else None

        return entered

    def _left(self, layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._open[threading.get_ident()]
        # A hook before ours may have raised: the call was not noted then.
        if not calls or calls[-1].layer is not layer:
            return
        call = calls.pop()
        if call.view is not None:
            layer._parameters["weight"] = call.weight
        self.called(call, output)
        call.x = call.view = None


def _with_views(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments with a view of the input; a view of the weight takes its place in the layer."""
    given, weight = call.x, call.weight
    plain = given is not None and type(given) in (torch.Tensor, torch.nn.Parameter) and not given.is_nested
    if given is None or not plain or not given.numel():
        call.x = None
        return None
    call.x = view = given.view_as(given)
    if weight is not None and torch.is_grad_enabled() and weight.requires_grad and _can_be_viewed(weight):
        call.view = weight.view_as(weight)
        if type(weight) is torch.nn.Parameter:
            # What hangs on it, as a gradient that the layer adds to by itself.
            vars(call.view).update(vars(weight))
        call.layer._parameters["weight"] = call.view

    def replaced(value: Any) -> Any:
        return view if value is given else value

    return tuple(map(replaced, args)), {key: replaced(value) for key, value in kwargs.items()}


def _can_be_viewed(weight: torch.Tensor) -> bool:
    """Plain parameters, and torchao's of which a view is one of them: for FSDP2, and wrappers that multiply in FP8."""
    wrapper = ("WeightWithDynamicFloat8", "TrainingWeightWrapper")
    return type(weight) is torch.nn.Parameter or any(name in type(weight).__name__ for name in wrapper)


def _hand_over(view: torch.Tensor, weight: torch.Tensor) -> None:
    """Add the gradient that a layer's own backward pass has put on the view to that of the parameter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        gradient = view.grad
    if gradient is not None:
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        view.grad = None


def _is_quantized(weight: torch.Tensor) -> bool:
    return hasattr(weight, "qdata") or "Float8Tensor" in type(weight).__name__ or "Quantized" in type(weight).__name__


def drawn_lines(device: torch.device, size: int, most: int, draw: int = 0) -> torch.Tensor:
    """Indices of some rows or columns of a matrix: all of ``size``; of more than ``most`` as many at random, since a
    regular choice could miss a regular fault, and both ends: a kernel's last tile is often a part of one. Each ``draw``
    gives others."""
    if size <= most:
        return torch.arange(size, device=device)
    generator = torch.Generator().manual_seed(size + 1_000_003 * draw)
    drawn = torch.randint(size, (most,), generator=generator)
    chosen: torch.Tensor = torch.cat([drawn, torch.tensor([0, size - 1])]).unique()
    return chosen.to(device)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix of the tensor's last dimension, detached."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


# -- products against the exact ones ----------------------------------------------------------------------------------

LINES = 128
"""Rows and columns of a product that are compared, beside both ends. For the weight gradient each call keeps as many
columns of its input: 1 MB a layer at 8B."""
CALLS = 32
"""Calls of one layer that are compared in a step."""


class ProductChecks(Probe):
    """Samples of each FP8 layer's products, forward and backward, or in the reference of all Linears', beside the exact
    ones of their operands. And at each call of ``optimizer.step()`` the gradients of the layers' weights, in the lines
    that are compared of their products, beside what these gave: on one GPU, since several reduce gradients between the
    two, and not of a step with a closure, which goes backward inside it."""

    views = True

    def __init__(self, engine: Engine, layers: Mapping[str, torch.nn.Module] | None = None) -> None:
        """``layers``: these alone."""
        case = engine.case
        # None under ZeRO-3, which holds no whole weight between steps.
        super().__init__(_multiplying(engine) if layers is None else layers, engine.device)
        self._engine, self._casts = engine, promised_casts(case.backend, case.recipe, case.full_options)
        self._calls = Counter[str]()
        self._found: list[tuple[str, Role, dict[str, torch.Tensor]]] = []
        self._gathered: dict[str, dict[Role, Operand]] = {}
        """Layer whose weight FSDP2 gathers in FP8 -> lines of the weight as it is before that."""
        self._scales: dict[str, dict[str, torch.Tensor]] = {}
        """Layer -> the scales of its last forward pass, which a recomputation uses again."""
        self._own_scales: set[str] = set()
        """Layers that keep numbers beside weight and bias which a watched step changed."""
        self._sums: dict[str, torch.Tensor | None] = {}
        """Layer -> the sum of its calls' weight gradients since the last step; ``None`` where one was not seen."""
        self._handed_on: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        for name, layer in self.layers.items():
            weight = layer._parameters["weight"]
            if weight is not None and Sharded.has(weight) and not is_plain(weight):
                whole = held(weight).whole()
                self._gathered[name] = {role: self._of_weight(name, whole, role) for role in (FPROP, DGRAD)}
        kept = {name: kept_numbers(layer) for name, layer in self.layers.items()}
        engine, one_gpu = self._engine, self._engine.case.gpus == 1
        fused = engine.backend.watch_fused_functions(engine.model, self._note_fused)
        stepped = on_steps(engine.optimizer, self._before_step) if one_gpu else nullcontext()
        try:
            with super().watching(), fused, stepped:
                yield
        finally:
            self._own_scales |= {name for name, layer in self.layers.items() if kept[name] != kept_numbers(layer)}
            self._gathered, self._scales, self._sums = {}, {}, {}

    def checks(self) -> list[dict[str, Any]]:
        """In the order of the products, with the fields of
        :class:`pytest_fp8.questions.numerics.evidence.ProductCheck`."""
        rows = _numbers(torch.stack([*numbers.values()]) for _, _, numbers in self._found)
        found = []
        for (name, role, numbers), row in zip(self._found, rows, strict=True):
            told: dict[str, Any] = dict(zip(numbers, row, strict=True))
            told |= {"values": int(told["values"]), "own_scales": name in self._own_scales}
            told |= {"sqnr": decibels(told.pop("noise")), "own_sqnr": decibels(told.pop("own_noise"))}
            found.append({"layer": name, "role": role, **told})
        return found

    def handed_on(self) -> list[dict[str, Any]]:
        """In the order of the steps, with the fields of :class:`pytest_fp8.questions.numerics.evidence.HandedOn`."""
        rows = _numbers(numbers for _, numbers in self._handed_on)
        return [
            {"layer": layer, "cosine": cosine, "factor": factor, "length": length}
            for (layer, _), (cosine, factor, length) in zip(self._handed_on, rows, strict=True)
        ]

    def called(self, call: Call, output: Any) -> None:
        self._calls[call.name] += 1
        operands = call.operands(output)
        if operands is None or self.phase == EVALUATION or self._calls[call.name] > CALLS:
            return
        given, _, seen, bias = operands
        role = RECOMPUTE if self.phase == "backward" else FPROP
        recorded = output.requires_grad and torch.is_grad_enabled()
        with unwatched():
            if role == FPROP:
                self._scales[call.name] = self._operand_scales(call.layer)
            call.scales = self._scales.get(call.name, {})
            self._compare_fprop(call, role, given, seen, bias)
            if recorded:
                self._follow_gradients(call, given, output)

    def _compare_fprop(
        self, call: Call, role: Role, given: torch.Tensor, seen: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        rows, outs = self._some(len(given)), self._some(seen.shape[1])
        expected = Expected(
            Operand(given[rows], given.abs().amax(), scale=call.scales.get(INPUT)),
            self._weight(call, FPROP),
            self._casts_of(call.name).get(FPROP),
            seen.dtype,
            bias[outs] if bias is not None else None,
        )
        self._found.append((call.name, role, expected.compare(seen[rows][:, outs])))

    def _follow_gradients(self, call: Call, given: torch.Tensor, output: torch.Tensor) -> None:
        """Compare the layer's two gradients when they are there. What they should be is known once the output's is."""
        casts = self._casts_of(call.name)
        # Its hook must not hold it: nothing would collect the two.
        view = weakref.ref(call.view) if call.view is not None else lambda: None
        # Where a block ends with its Linear, FSDP2 gathers the weight only after the gradient of its output came.
        weight = self._weight(call, DGRAD) if self._engine.case.gpus > 1 else None
        columns = [] if call.view is None else [given[:, self._some(given.shape[1])].clone(), given.abs().amax()]
        expected: dict[Role, Expected] = {}

        def came(gradient: torch.Tensor | None) -> None:
            # A function of the user's own may give none.
            if gradient is None:
                return
            with unwatched():
                dy = rows_of(gradient)
                made = partial(Operand, amax=dy.abs().amax(), scale=self._operand_scales(call.layer).get(GRADIENT))
                operands = {DGRAD: (made(dy[self._some(len(dy))]), weight or self._weight(call, DGRAD))}
                if columns:
                    x = Operand(columns[0].t(), columns[1], scale=call.scales.get(INPUT))
                    operands[WGRAD] = made(dy[:, self._some(dy.shape[1])].t()), x
                    columns.clear()
                expected.update({role: Expected(*both, casts.get(role), dy.dtype) for role, both in operands.items()})

        def compare(role: Role, seen: torch.Tensor | None) -> None:
            # A layer that adds to its weight's gradient by itself gives none: the parameter's is compared with BF16's.
            if seen is None or role not in expected:
                if role == WGRAD:
                    self._sums[call.name] = None
                    if (own := view()) is not None and call.weight is not None:
                        with unwatched():
                            _hand_over(own, call.weight)
                return
            with unwatched():
                compared = self._sample_of(rows_of(seen))
                self._found.append((call.name, role, expected.pop(role).compare(compared)))
                before = self._sums.get(call.name, 0.0)
                if role == WGRAD and before is not None:
                    self._sums[call.name] = before + compared.double()

        output.register_hook(came)
        for role, tensor in ((DGRAD, call.x), (WGRAD, call.view)):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(partial(compare, role))

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, made in self._sums.items() if closure_of(args, kwargs) is None else ():
            weight = self.layers[name]._parameters["weight"]
            if made is None or weight is None or type(weight.grad) is not torch.Tensor:
                continue
            with unwatched():
                gradient = self._sample_of(weight.grad).double()
                product, own, length = (gradient * made).sum(), made.square().sum(), gradient.norm()
                if own and length:
                    numbers = [product / (own.sqrt() * length), product / own, own.sqrt()]
                    self._handed_on.append((name, torch.stack(numbers)))
        self._sums.clear()

    def _note_fused(self, layer: torch.nn.Module, _: int, sample: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """A product of a library's function that does not call the layer (Unsloth): its forward product alone."""
        name = next((name for name, each in self.layers.items() if each is layer), None)
        if name is None or sample is None or self.phase == EVALUATION:
            return
        with unwatched():
            given, output = map(rows_of, sample)
            self._compare_fprop(Call(name, layer, layer._parameters["weight"], 0), FPROP, given, output)

    def _operand_scales(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Copies of the scales that this FP8 layer already has for its operands."""
        kept = self._engine.backend.scaling(layer)
        return {operand: scale.clone() for operand, scale in kept.operands.items()} if kept is not None else {}

    def _casts_of(self, name: str) -> Casts:
        return self._engine.own_fp8.casts.get(name, self._casts)

    def _some(self, size: int) -> torch.Tensor:
        return self.lines(size, LINES)

    def _sample_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """The rows and columns of a matrix that are compared of a product."""
        return matrix[self._some(matrix.shape[0])][:, self._some(matrix.shape[1])]

    def _weight(self, call: Call, role: Role) -> Operand:
        """Some lines of the weight along the inner dimension: rows in fprop, columns in dgrad."""
        if call.name in self._gathered:
            return self._gathered[call.name][role]
        # FSDP2 puts the gathered weight in the parameter's place for the call: the view is of that one.
        weight: Any = call.weight if call.view is None else call.view
        # A weight that is kept in FP8 only (Unsloth, quantized_model_init): its values as they are.
        if _is_quantized(weight):
            return self._of_weight(call.name, weight.detach().dequantize(), role)
        return self._of_weight(call.name, weight.detach(), role, call.scales.get(WEIGHT))

    def _of_weight(self, name: str, weight: torch.Tensor, role: Role, scale: torch.Tensor | None = None) -> Operand:
        dense = weight if role == FPROP else weight.t()
        lines, casts, squares = self._some(len(dense)), self._casts_of(name).get(role), None
        if casts is not None and casts[1].scales == SQUARE:
            squares = square_amax(dense)[torch.div(lines, 128, rounding_mode="floor")]
        return Operand(dense[lines], dense.abs().amax(), squares, scale)


def _numbers(rows: Iterable[torch.Tensor]) -> list[list[float]]:
    """Rows of equally many numbers, in one copy from the device."""
    found = list(rows)
    return torch.stack(found).tolist() if found else []


def _multiplying(engine: Engine) -> dict[str, torch.nn.Module]:
    """The arm's FP8 layers; in the reference all Linears, and what is of a class of the user's own, which may do more
    than multiply, as Megatron's parallel layers sum over ranks. Not one whose weight is an FP8 tensor alone: by which
    scale it is multiplied, the parameter does not say."""
    reference = engine.case == engine.case.reference()

    def is_asked(name: str, module: torch.nn.Module) -> bool:
        of_torch = type(module).__module__.startswith("torch.")
        return name in engine.originals or not of_torch if reference else engine.is_fp8_layer(module)

    products = {name: module for name, module in engine.model.named_modules() if is_product(module)}
    return {name: m for name, m in products.items() if is_asked(name, m) and not is_fp8_code(m._parameters["weight"])}


# -- each step of a curve ---------------------------------------------------------------------------------------------

LOOKED_AT = 3
"""Layers of a step whose product is looked at, drawn anew in each step."""
ROWS, COLUMNS = 16, 64
"""Of a product that are compared, beside both ends."""
DRAWS = 16
"""Choices of rows and columns that are taken in turn."""
FINEST = Cast(E4M3, LINE), Cast(E4M3, LINE)
"""Of both operands: what FP8 products are nearest to the exact ones with, whatever the recipe promises."""
COARSEST = Cast(E4M3, TENSOR), Cast(E4M3, TENSOR)
"""What they may be as far off as: one value far beyond the others takes their digits."""


class StepLooks(Probe):
    """The calls of the FP8 layers in forward passes that train, step by step: whether each multiplies in FP8, and a few
    right values of what it gives. Where a user's hook puts another tensor in its place, of that one too: BF16's product
    may be in it. By hooks, so where nothing is compiled. No number of the curve changes."""

    def __init__(self, engine: Engine, seed: int) -> None:
        watched = not (engine.compiled or engine.backend.brings_model)
        layers = {n: m for n, m in engine.model.named_modules() if watched and engine.is_fp8_layer(m)}
        super().__init__(layers, engine.device)
        # Scales of past steps may not fit a product, which is no fault of it.
        past = engine.calibration_passes
        self._products = [name for name, layer in layers.items() if not past and is_product(layer)]
        self._draw = random.Random(seed)
        self._chosen: set[str] = set()
        self._calls: list[list[int]] = []
        self._looks: list[tuple[int, str, torch.Tensor]] = []
        """Step, layer, and mean squares: of the values' error, of the errors that :data:`FINEST` and :data:`COARSEST`
        give, of the exact values, of the whole output."""
        self._replaced: dict[int, torch.Tensor] = {}
        """Look, by its index -> the same of what a hook put in the output's place."""
        self._last: tuple[torch.nn.Module, Any, Operands] | None = None
        """The layer that was looked at, what it gave, its operands: until its hooks have run."""

    def next_step(self) -> None:
        """Called before each step of the curve."""
        self._calls.append([0, 0])
        self._chosen = set(self._draw.sample(self._products, min(LOOKED_AT, len(self._products))))

    def noted(self) -> LayerCalls:
        """What was seen, after the last step."""
        found: dict[str, list[Look]] = {}
        rows = _numbers(numbers for _, _, numbers in self._looks)
        after = dict(zip(self._replaced, _numbers(self._replaced.values()), strict=True))
        for index, (wrong, finest, coarsest, exact, made) in enumerate(rows):
            step, name, _ = self._looks[index]
            # Against the whole output too: rows of small numbers are rounded by the scale of the large ones.
            if power := max(exact, made):
                # A hook may drop an output on purpose; none makes it more exact than FP8.
                of_finest = min(wrong, after.get(index, [wrong])[0]) / finest if finest else 1.0
                of_coarsest = wrong / coarsest if coarsest else math.inf
                found.setdefault(name, []).append(Look(step, wrong / power, of_finest, of_coarsest))
        return LayerCalls([count[0] for count in self._calls], [count[1] for count in self._calls], found)

    def called(self, call: Call, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if not isinstance(output, torch.Tensor) or output.grad_fn is None:
            return
        self._calls[-1][not _multiplied_in_fp8(output.grad_fn, call.began)] += 1
        if call.name not in self._chosen or type(call.x) is not torch.Tensor:
            return
        operands = call.operands(output) if type(call.weight) is torch.nn.Parameter else None
        self._chosen.discard(call.name)
        if operands is not None:
            with unwatched(), torch.autocast(output.device.type, enabled=False):
                self._looks.append((len(self._calls) - 1, call.name, self._look(*operands)))
            self._last = call.layer, output, operands

    def handles(self) -> list[Any]:
        after = [layer.register_forward_hook(Hook(self._after)) for layer in self.layers.values()]
        return [*super().handles(), *after]

    def _after(self, layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After the user's hooks."""
        if self._last is None or self._last[0] is not layer:
            return
        (_, before, (given, weight, _, bias)), self._last = self._last, None
        output = output[0] if isinstance(output, tuple) else output
        if output is not before and type(output) is torch.Tensor and output.shape == before.shape:
            with unwatched(), torch.autocast(output.device.type, enabled=False):
                self._replaced[len(self._looks) - 1] = self._look(given, weight, rows_of(output), bias, -1)

    def _look(
        self,
        given: torch.Tensor,
        weight: torch.Tensor,
        made: torch.Tensor,
        bias: torch.Tensor | None,
        again: int = 0,
    ) -> torch.Tensor:
        """``again``: -1 for another look at the same rows."""
        draw = (len(self._looks) + again) % DRAWS
        rows, columns = self.lines(len(made), ROWS, draw), self.lines(made.shape[1], COLUMNS, draw)
        operands = Operand(given[rows], given.abs().amax()), Operand(weight[columns], weight.abs().amax())
        added = bias[columns] if bias is not None else None
        finest, coarsest = (Expected(*operands, casts, made.dtype, added) for casts in (FINEST, COARSEST))
        exact = finest.exact
        wrong = made.index_select(0, rows).index_select(1, columns).double() - exact
        looked_at = (wrong, finest.own - exact, coarsest.own - exact, exact, made)
        squares = [torch.linalg.vector_norm(one, dtype=torch.float64).square() / one.numel() for one in looked_at]
        return torch.stack(squares)


def _multiplied_in_fp8(node: Any, began: int) -> bool:
    """Whether an autograd function of Python's was called since the sequence number ``began``: FP8 libraries multiply
    inside one, and ``torch.nn.functional.linear`` has none. Transformer Engine's notes whether FP8 was on."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction) and getattr(node, "fp8", True):
            return True
        # Private: a node's number is public in a profile alone.
        nodes += [n for n, _ in node.next_functions if n is not None and began <= n._sequence_nr() < _ACCUMULATES]
    return False


_ACCUMULATES = 2**63
"""Sequence numbers from here on are those of nodes that accumulate a parameter's gradient."""
