"""One training run of an arm, step by step: its losses, its gradients, how far its weights moved, how much ran in FP8.

A curve trains with the arm's own step, compiled as it is. What is read beside it changes no number of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.plain import to_plain
from pytest_fp8.questions.loss.evidence import START, Course, LayerCalls, Moved, ProductCount
from pytest_fp8.worker.notes import weights_of
from pytest_fp8.worker.record.gradients import norm_of_all
from pytest_fp8.worker.record.operators import dtype_name
from pytest_fp8.worker.record.probe import StepLooks
from pytest_fp8.worker.record.tables import counted_step
from pytest_fp8.worker.state.weights import moved_weights
from pytest_fp8.worker.tensors import held, parts, plain_name, trained, values
from pytest_fp8.worker.training.restored import hooked
from pytest_fp8.worker.training.step import innermost
from pytest_fp8.zoo import data

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


MOVED_BY_SCHEDULES = ("lr", "weight_decay", "momentum", "betas")
"""Settings of an optimizer's groups."""
DRAWS_APART = 10_007
"""Between the numbers that draw the noise of two seeds, and of two draws of one seed."""


def curve(
    engine: Engine,
    seed: int,
    steps: int,
    jitter: bool = False,
    first_step: int = 0,
    watch: bool = False,
    noise: int | None = None,
    noise_from: int = 0,
) -> dict[str, Any]:
    """``steps`` training steps from the weights of ``seed``, with ``first_step`` from where the arm is; the fields of
    :class:`pytest_fp8.questions.loss.evidence.Curve`.

    ``noise``: a number that draws it. From the step ``noise_from`` on, each step then goes forward and backward with
    weights that are moved by as much as FP8 moves products, and steps the arm's own weights.
    ``watch``: count the products of the last step, and in the curve of seed 0 those of the first one. On a GPU each is
    a profile of that step. In each step look at the calls of the FP8 layers.
    """
    if first_step == 0:
        engine.restart(seed, jitter)
    losses: list[torch.Tensor] = []
    fingerprint, at_start, last = 0, 0, first_step + steps - 1
    course = TrainingCourse(engine)
    counts: dict[int, Mapping[str, ProductCount]] = {}
    looks = StepLooks(engine, seed) if watch else None
    with course.watching(), looks.watching() if looks is not None else nullcontext():
        for step in range(first_step, first_step + steps):
            batch = engine.training_batch(seed, step)
            fingerprint = data.fingerprint(batch, fingerprint)
            at_start = fingerprint if step < first_step + START else at_start
            if looks is not None:
                looks.next_step()
            if watch and (step == last or step == seed == 0):
                loss, counts[step] = counted_step(engine, batch, course.note_gradients)
            elif noise is not None and step >= noise_from:
                loss = _noisy_step(
                    engine, batch, course.note_gradients, DRAWS_APART * (DRAWS_APART * noise + seed) + step
                )
            else:
                loss = engine.step(batch, on_gradients=course.note_gradients)
            losses.append(loss.float())
            course.note_training_step(loss)
    told = {
        "seed": seed,
        "losses": torch.stack(losses).tolist(),
        "eps": torch.finfo(loss.dtype).eps,
        "gradient_norms": course.norms(),
        "data": fingerprint,
        "data_at_start": at_start,
        **to_plain(course.noted()),
        "first_products": to_plain(counts.get(0, {})),
        "last_products": to_plain(counts.get(last, {})),
        "calls": to_plain(looks.noted() if looks is not None else LayerCalls()),
    }
    if engine.case.gpus > 1:
        # Of what every rank has the whole: the same, as the ranks must agree.
        noted = weights_of(engine.model)
        told["weights"] = {name: each.digest for name, each in noted.items() if each.trained and not each.buffer}
    return told


def _noisy_step(engine: Engine, batch: Any, note_gradients: Callable[[], None], draw: int) -> torch.Tensor:
    with moved_weights(engine, draw) as put_back:

        def before_optimizer() -> None:
            put_back()
            note_gradients()

        return engine.step(batch, on_gradients=before_optimizer)


class TrainingCourse:
    """Beside the losses of a curve: what the optimizer did and keeps, which tensors moved, what is left over.

    From when it is made, at the start of a curve, to its end. Tensors go by plain names. Of each a sample is kept; of
    one that is sharded, of this rank's part.
    """

    def __init__(self, engine: Engine) -> None:
        self._model, self._optimizer, self._linears = engine.model, engine.optimizer, engine.originals
        self._start = {name: values(tensor).clone() for name, tensor in self._tensors()}
        self._reached = {
            name: torch.zeros_like(self._start[name], dtype=torch.bool)
            for name in trained(self._model, self._optimizer)
            if name in self._start
        }
        """Of what the optimizer steps: values that had a gradient other than 0."""
        self._rates = [self._rates_now()]
        self._norms: list[torch.Tensor] = []
        self._norm: torch.Tensor | None = None
        self._stepped: list[int] = []
        self._now = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around all steps of the curve."""
        # Steps, and no calls of a closure: how often a line search asks depends on the losses.
        with hooked([innermost(self._optimizer).register_step_pre_hook(self._note_optimizer_step)]):
            yield

    def _note_optimizer_step(self, *_: Any) -> None:
        self._now += 1

    def note_gradients(self) -> None:
        """Called before each step of the optimizer, and after each call of its closure."""
        self._norm = norm_of_all(self._model.parameters())
        for name, gradient in self._gradients(lambda parameter: held(parameter).gradient()):
            if name in self._reached:
                self._reached[name] |= values(gradient) != 0

    def note_training_step(self, loss: torch.Tensor) -> None:
        """Called after each training step."""
        # A hand-written step may step its optimizer twice, or not at all, as where its loss is not finite.
        self._norms.append(self._norm if self._norm is not None else loss.float() * 0)
        self._norm = None
        self._stepped.append(self._now)
        self._now = 0
        self._rates.append(self._rates_now())

    def norms(self) -> list[float]:
        """The norm of all gradients at the last step of the optimizer in each training step."""
        return [float(norm) for norm in torch.stack(self._norms).cpu()]

    def noted(self) -> dict[str, Course | dict[str, Moved]]:
        """``course``; and ``movement``, of what the optimizer steps."""
        movement, alone = dict[str, Moved](), dict[str, bool]()
        for name, tensor in self._tensors():
            now, start, reached = values(tensor), self._start.get(name), self._reached.get(name)
            if start is None or len(now) != len(start):
                continue
            if reached is None:
                alone[name] = bool((now != start).any())
            else:
                movement[name] = Moved(held(tensor).shape.numel(), moved=_share(now != start), reached=_share(reached))
        left = sorted(name for name, gradient in self._gradients(lambda p: p.grad) if bool(values(gradient).any()))
        course = Course(self._rates, self._stepped, self._state(), left, self._modes(), alone)
        return {"course": course, "movement": movement}

    def _modes(self) -> dict[str, bool]:
        """Not of Linears, and of what took their places: a conversion makes them in train mode, which changes nothing
        they compute."""
        found: dict[str, bool] = {}
        for name, module in ((plain_name(name), module) for name, module in self._model.named_modules()):
            holder = name.rpartition(".")[0]
            if name not in self._linears and (not name or holder in found):
                found[name] = module.training
        return found

    def _rates_now(self) -> dict[str, list[float]]:
        groups, found = innermost(self._optimizer).param_groups, dict[str, list[float]]()
        for name in MOVED_BY_SCHEDULES:
            given = [group[name] for group in groups if group.get(name) is not None]
            numbers = [each for value in given for each in (value if isinstance(value, Sequence) else [value])]
            found[name] = [float(number) for number in numbers]
        return found

    def _state(self) -> dict[str, str]:
        """Parameter -> the tensors of more than one element that the optimizer keeps for it, with their type."""
        names = {id(parameter): (name, parameter) for name, parameter in self._model.named_parameters()}
        found: dict[str, str] = {}
        for parameter, entries in innermost(self._optimizer).state.items():
            if id(parameter) not in names or not isinstance(entries, dict):
                continue
            kept = {
                str(key): dtype_name(value)
                for key, value in entries.items()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            }
            words = ", ".join(f"{key} {dtype}" for key, dtype in sorted(kept.items()))
            found.update((part, words) for part, _ in parts(*names[id(parameter)]))
        return found

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in (*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers()):
            yield from parts(name, tensor)

    def _gradients(self, of: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            gradient = of(parameter)
            if gradient is not None and not gradient.is_sparse:
                yield from parts(name, gradient, of=parameter)


def _share(flags: torch.Tensor) -> float:
    return float(flags.float().mean()) if flags.numel() else 0.0
