"""What there is to switch on: backends, by the entry points of installed packages, and their recipes. Plain data.

Sources: torchao ``Float8LinearRecipeName``; Transformer Engine ``transformer_engine.common.recipe``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from pytest_fp8.codes import Code, R
from pytest_fp8.errors import refuse, refuse_unknown
from pytest_fp8.libraries import installed

Role = str
FPROP, DGRAD, WGRAD, RECOMPUTE = "fprop", "dgrad", "wgrad", "recompute"
ROLES: tuple[Role, ...] = (FPROP, DGRAD, WGRAD)

HEADS = ("lm_head", "embed_out", "output", "head", "classifier", "score")
"""Names of output projections. Every recipe leaves them in high precision, except through Accelerate: there a head is
converted like any other Linear, unless torchao is below and the head is the model's first or last Linear."""


class Stays(StrEnum):
    """Why a Linear stays in high precision."""

    HEAD, ADAPTER, SIZE, EDGE, REFERENCE = "head", "adapter", "size", "edge", "reference"
    LEFT = "filter"
    """The workload's ``leave``."""


@dataclass(frozen=True)
class Reason:
    """Why one Linear stays in high precision, with the size or pattern that it is about."""

    kind: Stays
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class RecipeFacts:
    """What a recipe promises, and which options users set on it. A backend lists its own."""

    name: str
    roles: tuple[Role, ...] = ROLES
    """Roles whose products run in FP8."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Option -> default."""
    switches: tuple[str, ...] = ()
    """Options that are off by default and count where they are on, so that cases without them stay what they were."""
    minimum_capability: tuple[int, int] = (8, 9)
    """The lowest compute capability that can run it."""
    only_capabilities: tuple[int, ...] = ()
    """Major compute capabilities that can run it; empty: any from ``minimum_capability`` up."""
    calibration_passes: int = 0
    """Forward and backward passes that a fresh model needs before its scales fit."""


POWERS = "round_scales_to_power_of_2"
GROUP = "pytest_fp8.backends"
"""Of the entry points that name backends, this package's and others'."""
DEFAULT_RECIPE = "tensorwise"
"""What a mark without ``recipe=`` means."""
SCRIPT = "script"
"""The backend of a case that is a user's own script."""
NO_RECIPE = RecipeFacts("none", roles=())
"""Of a reference in BF16."""


@dataclass(frozen=True)
class WayFacts:
    """What pytest's process reads of a way to train one model, on one rank or several, without torch."""

    at: str
    """``module:Class`` of the :class:`pytest_fp8.backends.ways.Way`, which an arm loads."""
    compiles: bool = True
    """Its model may be compiled."""
    keeps_weights: bool = True
    """Weights stay as they are, so that they may be in float32 under autocast."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """Package -> the lowest version that is known to work."""


WAYS = {
    "": WayFacts("pytest_fp8.backends.ways:Way"),
    "ddp": WayFacts("pytest_fp8.backends.ways:Ddp"),
    "fsdp2": WayFacts("pytest_fp8.backends.ways:Fsdp2"),
    "zero3": WayFacts("pytest_fp8.backends.zero:Zero3", False, False, {"deepspeed": "0.16"}),
    "own": WayFacts("pytest_fp8.backends.ways:Own"),
}
"""By ``Case.parallel``; empty: one rank. ``own``: as the workload's ``parallelize`` says."""
PARALLEL = tuple(filter(None, WAYS))
"""How an arm of several ranks trains."""


class Rule(NamedTuple):
    """What the fields of a :class:`pytest_fp8.case.Case` must agree in. ``what`` and ``seen`` are formats with
    ``case``."""

    sound: Callable[[Any], Any]
    what: str
    expected: str
    seen: str = "{case.id}"
    code: Code = R.FIELDS_DISAGREE


class BackendFacts:
    """What a backend says of itself: all that pytest's process reads of it, without torch."""

    name: str = ""
    """As in ``backend=``, and as its entry point is called."""
    short: str = ""
    """Its name in the ids of cases, where that is another one; ``backend=`` takes it as well."""
    recipes: Sequence[RecipeFacts] = ()
    """The first is the usual one."""
    library: str = ""
    """The backend whose FP8 layers it trains, where it adds something around them: ``torchao``."""
    requires: Mapping[str, str] = {}
    """Package -> the lowest version that is known to work."""
    emulates: bool = False
    """Its FP8 numerics also run on a CPU, in high precision."""
    parallel: Sequence[str] = ()
    """How it trains on several GPUs: some of :data:`PARALLEL`."""
    reference: str = "bf16"
    """The backend of the BF16 arm."""
    reference_on_ranks: str = "bf16"
    """The same on several GPUs."""
    through_accelerate: bool = False
    """Accelerate prepares the model: it parallelizes, and its state stays in the process. Its users get BF16 autocast
    around the forward pass and outputs in float32: dtypes outside FP8 are not compared."""
    brings_model: bool = False
    """It builds and compiles a model of its own, of which adapters are trained alone. Its library
    changes transformers, peft or torch, and is imported in its own arm only, before them."""
    other_modules: bool = False
    """It puts modules of its own in the place of whole blocks, or computes in functions without modules. Calls,
    products, operators, waits and random numbers are then others by design. What enters, weights, optimizer, switches
    and the numbers of backward passes and optimizer steps are compared."""

    rules: Sequence[Rule] = ()
    """What it asks of a case."""
    writes_to: Mapping[str, str] = {}
    """Variable that says where its library writes -> a folder's name below the arm's own."""
    scaling_state: str = ""
    """How the keys of the state dict end that hold scaling state and no weight; empty where there are none."""
    saves: Sequence[str] = ()
    """Parts of the keys that users save in a checkpoint; empty where they save all."""

    def available(self) -> tuple[bool, str]:
        """(the required packages are installed and recent enough, their versions or what is wrong), without importing
        any."""
        found = [installed(package, lowest) for package, lowest in self.requires.items()]
        wrong = [said for there, said in found if not there]
        return not wrong, wrong[0] if wrong else " and ".join(said for _, said in found)


class Script(BackendFacts):
    """No backend that a mark names: a user's own script in FP8, which switches it on by itself."""

    name = SCRIPT
    recipes: Sequence[RecipeFacts] = (NO_RECIPE,)
    emulates = True
    parallel: Sequence[str] = ("own",)
    reference = reference_on_ranks = f"{SCRIPT}_bf16"
    # Of its layers and operators nothing is recorded.
    other_modules = True


class ScriptBf16(Script):
    """The same script without FP8."""

    name = Script.reference


SCRIPTS: Mapping[str, type[BackendFacts]] = {kind.name: kind for kind in (Script, ScriptBf16)}


@cache
def backend_type(name: str) -> type[BackendFacts]:
    """The class of the backend of that name, long or short: what it says of itself. Raises ``KeyError``."""
    if name in SCRIPTS:
        return SCRIPTS[name]
    if name in _entries():
        return _entries()[name].load()  # type: ignore[no-any-return]
    return {kind.short: kind for kind in types() if kind.short}[name]


def known_backend(name: str) -> type[BackendFacts]:
    """The same for a name that a person typed: raises :class:`SettingsError` naming the known ones."""
    try:
        return backend_type(name)
    except KeyError:
        known = [kind.name for kind in types()]
        refuse_unknown(
            R.UNKNOWN_NAME,
            f"unknown FP8 backend {name!r}",
            name,
            [*known, *(kind.short for kind in types() if kind.short)],
            "backend='torchao' or backend='transformer_engine' ('te') for a model in plain PyTorch",
        )


def library_of(name: str) -> str:
    """The library whose FP8 layers a backend trains: the name of its own backend."""
    return backend_type(name).library or name


def types() -> list[type[BackendFacts]]:
    """All installed backends, those of a library's own before those that go through another."""
    found: list[type[BackendFacts]] = [entry.load() for entry in _entries().values()]
    return sorted(found, key=lambda kind: (kind.library not in ("", kind.name), kind.name))


@cache
def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def recipe_facts(backend: str, name: str) -> RecipeFacts:
    """The facts of a recipe; raises :class:`SettingsError` naming the known ones."""
    known = known_backend(backend).recipes
    facts = {each.name: each for each in known}.get(name)
    if facts is None:
        others = [kind.name for kind in types() if any(each.name == name for each in kind.recipes)]
        refuse_unknown(
            R.UNKNOWN_NAME,
            f"backend {backend!r} has no recipe {name!r}",
            name,
            [each.name for each in known],
            f"recipe={known[0].name!r}" + (f", or backend={others[0]!r}, which has {name!r}" if others else ""),
            cause=f"a mark without recipe= means {name!r}, a recipe of {others[0]}" if name == DEFAULT_RECIPE else "",
        )
    return facts


def unmet_need(backend: str, name: str, capability: tuple[int, int]) -> str:
    """What a recipe needs that a GPU of this compute capability has not, or an empty string."""
    facts = recipe_facts(backend, name)
    if capability < facts.minimum_capability:
        return f"needs compute capability {'.'.join(map(str, facts.minimum_capability))} or newer"
    if facts.only_capabilities and capability[0] not in facts.only_capabilities:
        return f"runs on capability {facts.only_capabilities[0]}.x alone"
    return ""


def recipe_options(backend: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The full options of a recipe: its defaults, replaced by ``given``.

    Raises :class:`SettingsError` for an option the recipe does not have or a value of another type than the default's.
    """
    facts = recipe_facts(backend, name)
    for option, value in given.items():
        if option not in facts.options and option not in facts.switches:
            known = [*facts.options, *facts.switches]
            refuse_unknown(
                R.UNKNOWN_NAME, f"recipe {name!r} of {backend!r} has no option {option!r}", option, known, "options={}"
            )
        # 1 is equal to True and has another name in the case's id. What a library takes is the library's to say.
        kind = type(facts.options.get(option, False))
        if type(value) is not kind:
            what = f"option {option!r} of recipe {name!r}"
            refuse(R.BAD_VALUE, what, expected=f"a value of the type {kind.__name__}", seen=repr(value))
    return {**facts.options, **{name: value for name, value in given.items() if value or name not in facts.switches}}
