"""What a control states: one way to break FP8 training, the question that must find it, and the code it must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_fp8.case import Case

if TYPE_CHECKING:
    import torch as torch  # noqa: PLC0414  # for the tables, too
    from torch import Tensor as Tensor  # noqa: PLC0414

    from pytest_fp8.backends.base import Conversion
    from pytest_fp8.codes import Code
    from pytest_fp8.errors import Fp8Error
    from pytest_fp8.pair import Fp8Pair
    from pytest_fp8.script.command import Script
    from pytest_fp8.verdicts import Decision
    from pytest_fp8.worker.run.engine import Engine
    from pytest_fp8.workload import Workload
else:
    Engine = Tensor = object

    class _Torch:
        """torch, imported when an arm asks for something of it: pytest's process imports the controls, too."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch = _Torch()

EMULATED, ANYWHERE, GPU = "emulated", "anywhere", "gpu"
CONSTRUCTED = "constructed"
_OTHERS = {"N": "numerics", "C": "loss", "S": "faster", "M": "memory", "K": "checkpoints"}
QUESTIONS = {**dict.fromkeys("LDP", "layers"), **_OTHERS}
"""Letter of a code -> the question that finds it, where a control states no other."""
BOTH, REFERENCE = ("fp8", "bf16"), ("bf16",)


def micro(recipe: str = "tensorwise", **more: Any) -> Case:
    """The emulated case of a control: a model of 0.1 M parameters whose step takes milliseconds."""
    return Case(more.pop("model", "micro"), "torchao", recipe, emulated=True, **more)


def tiny(backend: str, recipe: str, **more: Any) -> Case:
    """A case on a GPU that asks everything but speed, of which a model this small says nothing."""
    return Case("tiny", backend, recipe, questions=("layers", "numerics", "loss", "memory", "checkpoints"), **more)


class Control(Engine):
    """One broken arm, checkpoint, baseline or run: the methods of the arm's engine that it overrides break it.

    The arm puts its engine below the class, which so needs no torch in pytest's process.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str] = CONSTRUCTED
    """Where it was seen: a link, or the subject of a user's ``report:``. ``constructed`` where it was not."""
    question: ClassVar[str]
    """The question that must find it: a method of ``fp8_pair``, or ``baseline``, ``session`` or ``precision``."""
    code: ClassVar[Code]
    """The code that must come with the verdict."""
    about: ClassVar[str] = ""
    """The layer, weight or number that the message must name beside the code."""
    otherwise: ClassVar[Mapping[str, str]] = {}
    """What it must say with some of its verdicts, where that is something else."""
    verdicts: ClassVar[tuple[str, ...]] = ("FAIL",)
    """The verdicts that catch it. Where arms differ (codes with D) the default is INVALID."""
    case: Case = micro()
    """The pair it is run with; ``None`` where no arm is needed."""
    workload: ClassVar[Workload | None] = None
    """The model, where it needs one of its own."""
    script: ClassVar[Script | None] = None
    """The user's command whose runs are both arms, where it is no model."""
    breaks: ClassVar[tuple[str, ...]] = ("fp8",)
    """The arms it breaks: ``fp8``, ``bf16``; none where the workload itself is the fault."""
    ends_arms: ClassVar[bool] = False
    """Whether the arm itself says what is wrong, in an error: its ranks disagree, or it ends."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages beyond the backend's own."""
    nightly: ClassVar[bool] = False
    """Whether it runs each night alone; :mod:`controls.catalogue` names those that run for each commit."""
    now = 0
    """The step of the curve that runs, or ran last."""

    def convert(self) -> Conversion:
        meant = super().convert()
        self.converted(self.model)
        return meant

    def converted(self, model: Any) -> None:
        """Break the converted model."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        made = super().make_optimizer()
        self.optimizer_made(made)
        return made

    def optimizer_made(self, made: torch.optim.Optimizer) -> None:
        """Break the optimizer, in place."""

    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        self.now = step
        self.before_step(seed, step)
        return super().training_batch(seed, step, whole)

    def before_step(self, seed: int, step: int) -> None:
        """Break what a training step starts from."""

    def step(self, *given: Any, **more: Any) -> torch.Tensor:
        loss = super().step(*given, **more)
        self.stepped()
        return loss

    def stepped(self) -> None:
        """Break what a training step leaves."""

    def fp8_layers(self) -> list[Any]:
        return [module for module in self.model.modules() if self.backend.is_fp8_layer(module)]

    @classmethod
    def runs(cls) -> str:
        """``emulated`` (any machine, torchao's numerics), ``anywhere`` (no arm at all) or ``gpu``."""
        if cls.case is None:
            return ANYWHERE
        return EMULATED if cls.case.emulated else GPU

    @classmethod
    def path(cls) -> str:
        """What the spec of an arm says, for the arm to import this class by."""
        return f"controls.catalogue:{cls.id}"

    @classmethod
    def ask(cls, pair: Fp8Pair | None) -> Outcome:
        """Ask the question that must find it. ``pair`` is ``None`` for a control without arms, which overrides this."""
        decision: Decision = getattr(pair, cls.question)()
        return Outcome.of(cls, decision)


@dataclass(frozen=True)
class Outcome:
    """A control's run: the verdict, its code, and the words it came with."""

    control: type[Control]
    verdict: str
    message: str
    code: Code | None = None

    @classmethod
    def of(cls, control: type[Control], found: Decision | Fp8Error) -> Outcome:
        verdict = getattr(found, "verdict", None)
        return cls(control, verdict.value if verdict else "FAIL", found.message, found.code)

    @property
    def caught(self) -> bool:
        """Whether the right verdict came with the right code."""
        otherwise = self.control.otherwise.get(self.verdict)
        if otherwise is not None:
            return self.verdict in self.control.verdicts and otherwise in self.message
        found = self.code is self.control.code and self.control.about in self.message
        return found and self.verdict in self.control.verdicts


CONTROLS: dict[str, type[Control]] = {}
"""By id, in the order in which they are stated. :mod:`controls.catalogue` has all."""
WAYS: dict[str, type[Control]] = {}
"""What a row states -> the way that it is (:mod:`controls.ways`)."""
OF_TENSORS = ("input", "weight", "output_gradient", "dgrad", "wgrad")
"""Of these the functions that are given no arm: they change a tensor."""


def control(id: str, code: Code, title: str = "") -> Callable[..., type[Control]]:
    """One row of the catalogue, to be called with what breaks an arm: attributes of a control, and functions as its
    methods, which are given the arm first. Ways follow from what is stated (:data:`WAYS`); of several methods one may
    be a class, which this decorates."""
    if id in CONTROLS:
        raise ValueError(f"two controls have the id {id!r}")

    def enter(way: type[Control] = Control, **stated: Any) -> type[Control]:
        letter = str(code)[4]
        usual: dict[str, Any] = {"verdicts": ("INVALID",)} if letter == "D" else {}
        usual |= {"question": QUESTIONS[letter]} if letter in QUESTIONS else {}
        methods = {name: staticmethod(value) if name in OF_TENSORS else value for name, value in stated.items()}
        ways = dict.fromkeys([way, *(WAYS[name] for name in stated if name in WAYS)])
        bases = tuple(sorted(ways, key=lambda one: len(one.__mro__), reverse=True))
        told = {"id": id, "title": title or id.replace("-", " "), "code": code}
        CONTROLS[id] = type(id, bases, {**usual, **methods, **told})
        return CONTROLS[id]

    return enter
