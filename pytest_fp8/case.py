"""A case: what both arms of a pair train and how FP8 is switched on, as a frozen value with an id and a hash.

>>> case = Case(model="1b", backend="transformer_engine", recipe="current")
>>> case.id
'1b-te-current'
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse, refuse_unknown
from pytest_fp8.plain import PlainDataError, plain_value, types_of
from pytest_fp8.recipes import (
    PARALLEL,
    WAYS,
    Rule,
    backend_type,
    known_backend,
    recipe_facts,
    recipe_options,
    types,
)
from pytest_fp8.zoo.shapes import SHAPES

OWN = "own"
"""The model name of a case whose model comes from the user's ``fp8_workload`` fixture."""
OWN_STEPS, OWN_SEEDS = 40, 4
QUESTIONS = ("layers", "numerics", "loss", "speedup", "memory", "checkpoints")
ON_A_GPU = ("speedup", "memory")
"""Questions that no emulated case answers."""
CHIPS = ("hopper", "blackwell", "ada")
CHECKPOINT_FORMATS = ("safetensors", "dcp")
OWN_STORE = "own"
"""The store that is a workload's own ``save()`` and ``load()``."""
EXPECTED = {
    "str": "a text",
    "bool": "True or False",
    "int": "a whole number",
    "float": "a number",
    "tuple[str, ...]": "a tuple of texts: ('...',)",
    "Mapping[str, Any]": "a dict with names as keys: {'...': ...}",
}
"""A field's annotation -> what a message calls it."""
WITHIN: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: ("a whole number from 1", lambda n: n >= 1) for name in ("batch", "seq")},
    **{name: ("a whole number from 1", lambda n: n >= 0) for name in ("steps", "seeds")},
    "lora": ("a whole number: a rank, or 0", lambda rank: rank >= 0),
    "tolerance": ("a fraction between 0 and 1, such as 0.02", lambda loss: 0 < loss < 1),
    "floor": ("a speedup over BF16 above 0, such as 1.0", lambda floor: 0 < floor < math.inf),
}
"""Field -> what a message calls its values, and whether one of its type is among them."""


@dataclass(frozen=True)
class Case:
    """Model x backend x recipe x options. Fields marked *gate* decide verdicts and are not in the hash.

    Raises :class:`SettingsError` for a combination that cannot be.
    """

    model: str
    backend: str
    recipe: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Recipe options that differ from the recipe's defaults."""
    compile: bool = True
    activation_checkpointing: bool = False
    batch: int | None = None
    """Sequences in a batch; ``None``: the model's default."""
    seq: int | None = None
    """Tokens in a sequence; ``None``: the model's default."""
    emulated: bool = False
    """FP8 numerics computed on the CPU: answers layers, numerics, loss and checkpoints, never speed or memory."""
    chip: str = ""
    """Runs on this kind of GPU alone: one of :data:`CHIPS`; empty: on each that can run the recipe."""
    autocast: bool = False
    """Weights stay in float32, and forward passes run under ``torch.autocast`` to bfloat16, in both arms."""
    lora: int = 0
    """Rank of the LoRA adapters, which are then all that is trained; 0 trains all weights."""
    lora_targets: tuple[str, ...] = ()
    """Names of the Linears that get adapters; empty: all of a block's."""
    name: str = ""
    """Tells a user's own models apart: ``own.vit``."""
    steps: int = 0
    """Steps of one loss curve; 0 becomes the model's default."""
    seeds: int = 0
    """Seeds that the loss question starts with; 0 becomes the model's default."""
    gpus: int = 1
    """Ranks of each arm, a GPU each; on the CPU processes. ``batch`` is that of all ranks together."""
    parallel: str = ""
    """How several ranks train one model: ``ddp``, ``fsdp2``, ``zero3``, or ``own``."""
    questions: tuple[str, ...] = QUESTIONS
    """*gate*: the questions this case can answer."""
    tolerance: float = 0.02
    """*gate*: the loss of speedup against the baseline that must be caught, as a fraction. A smaller loss fails too
    where the measurement proves it and cannot exclude one of this size."""
    floor: float = 1.0
    """*gate*: the speedup over BF16 that FP8 must exceed."""
    checkpoint_formats: tuple[str, ...] = CHECKPOINT_FORMATS
    """*gate*: the stores that the checkpoint question goes through. ``own`` is added where the workload has ``save``
    and ``load``."""
    resume: bool = True
    """*gate*: whether the checkpoint question also carries the optimizer and resumes training."""

    def __post_init__(self) -> None:
        for each in fields(self):
            self._be(each.name, field_value(each.name, getattr(self, each.name)))
        kind = known_backend(self.backend)
        self._be("backend", kind.name)
        # Before the recipe is looked up: the default of a mark may be none of the backend's.
        _require(self, EMULATES)
        full, defaults = self.full_options, recipe_facts(self.backend, self.recipe).options
        self._be("options", {k: v for k, v in full.items() if v != defaults.get(k)})
        own = "leave model= out, and bring a model of your own with the fixture fp8_workload"
        _known("model", self.model, [*SHAPES, OWN], own)
        shape = SHAPES.get(self.model)
        self._be("steps", self.steps or (shape.loss_steps if shape else OWN_STEPS))
        self._be("seeds", self.seeds or (shape.loss_seeds if shape else OWN_SEEDS))
        if self.emulated:
            self._be("questions", tuple(q for q in self.questions if q not in ON_A_GPU))
            self._be("compile", False)
        for question in self.questions:
            _known("question", question, QUESTIONS)
        for what, known in (("chip", CHIPS), ("parallel", PARALLEL)):
            if value := getattr(self, what):
                _known(what, value, known)
        for rule in (*RULES, *kind.rules):
            _require(self, rule)

    def _be(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        # Options are a dict, which has no hash.
        return hash(self.id)

    @property
    def id(self) -> str:
        """Also names the baseline file: letters, digits, ``-``, ``_`` and ``.``. Different names differ in it."""
        model = f"{self.model}.{self.name}" if self.name else self.model
        parts = [model, backend_type(self.backend).short or self.backend]
        if self.recipe != "none":
            parts.append(self.recipe)
        parts += [f"{name}.{value}" for name, value in sorted(self.options.items())]
        for flag, word in (
            (self.emulated, "emulated"),
            (not self.compile and not self.emulated, "eager"),
            (self.activation_checkpointing, "ac"),
            (self.autocast, "autocast"),
            (self.lora > 0, ".".join([f"lora{self.lora}", *self.lora_targets])),
            (self.gpus > 1, f"{self.parallel}.{self.gpus}"),
        ):
            if flag:
                parts.append(word)
        if self.batch is not None or self.seq is not None:
            batch, seq = self.tokens or (self.batch or "b", self.seq or "s")
            parts.append(f"{batch}x{seq}")
        return "-".join(map(writable, parts))

    @property
    def full_options(self) -> dict[str, Any]:
        """Every option of the recipe, defaults included."""
        return recipe_options(self.backend, self.recipe, self.options)

    @property
    def needs_gpu(self) -> bool:
        return not self.emulated

    @property
    def tokens(self) -> tuple[int, int] | None:
        """(batch, seq) of one timed step; ``None`` where the user's own batch function decides."""
        if self.model == OWN:
            return None
        shape = SHAPES[self.model]
        return self.batch or shape.batch, self.seq or shape.seq

    def asks(self, question: str) -> bool:
        return question in self.questions

    @property
    def judged_by(self) -> tuple[Any, ...]:
        """The values of its *gate* fields: cases that differ in these alone share their arms and what these answer."""
        return tuple(getattr(self, name) for name in _GATE_FIELDS)

    def reference(self) -> Case:
        """The BF16 case with the same weights, data and seeds. It is compiled even where the FP8 arm is not, since FP8
        must beat the fastest BF16. A user's own model, which might not compile, is compiled where the FP8 arm is."""
        compiled = self.compile or (self.model != OWN and WAYS[self.parallel].compiles)
        kind = backend_type(self.backend)
        reference = kind.reference_on_ranks if self.parallel else kind.reference
        return replace(self, backend=reference, recipe="none", options={}, compile=compiled)

    def digest(self, workload: str = "") -> str:
        """Hash of all that can change a number, 16 hex digits; ``workload``: the fingerprint of a user's own model."""
        always = ["model", "backend", "recipe", "compile", "emulated", "activation_checkpointing", "batch", "seq"]
        where_used = {"autocast": False, "lora": 0, "lora_targets": (), "name": "", "gpus": 1, "parallel": ""}
        content = {name: getattr(self, name) for name in always}
        content |= {name: value for name, unused in where_used.items() if (value := getattr(self, name)) != unused}
        content |= {"options": self.full_options, "weights": False}
        content |= {"horizon": self.steps, "seeds": self.seeds}
        content["shape"] = SHAPES[self.model].describe() if self.model != OWN else workload
        # Stored hashes have these, and "weights". The second one is raised where what a case trains changes and no
        # field says so.
        content |= {"chip": "hopper", "measurement": 2}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


_GATE_FIELDS = ("questions", "tolerance", "floor", "checkpoint_formats", "resume")


def _require(case: Case, rule: Rule) -> None:
    """Raise :class:`SettingsError` unless the rule holds."""
    if not rule.sound(case):
        backends = ", ".join(kind.name for kind in types() if case.parallel in kind.parallel)
        what, expected, seen = (text.format(case=case, backends=backends) for text in rule[1:4])
        refuse(rule.code, what, expected=expected, seen=seen)


def _is_own(case: Case) -> bool:
    return case.model == OWN


EMULATES = Rule(
    lambda case: not case.emulated or backend_type(case.backend).emulates,
    "{case.backend!r} cannot be emulated",
    "torchao, alone or through Accelerate, whose numerics run on any processor",
    "emulated=True with backend={case.backend!r}",
    R.NOT_EMULATED,
)
RULES = (
    Rule(
        lambda case: not _is_own(case) or (case.batch, case.seq) == (None, None),
        "batch= or seq= with a model of your own",
        "neither: they are for models of the suite, and your own batch(step) decides",
        "batch={case.batch}, seq={case.seq}",
    ),
    Rule(
        lambda case: not case.autocast or WAYS[case.parallel].keeps_weights,
        "float32 weights under autocast and parallel={case.parallel!r}",
        "a way to shard that keeps weights as they are; this one makes float32 master weights itself",
    ),
    Rule(
        lambda case: case.gpus >= 1 and (case.gpus > 1) == bool(case.parallel),
        "gpus and parallel of a case",
        f"gpus=2 or more with parallel= one of {', '.join(PARALLEL)}; or neither",
        "gpus={case.gpus!r}, parallel={case.parallel!r}",
    ),
    Rule(
        lambda case: not case.parallel or case.parallel in backend_type(case.backend).parallel,
        "backend under {case.parallel}",
        "one of {backends}",
        "{case.backend}",
    ),
    Rule(
        lambda case: case.parallel != "own" or _is_own(case),
        "parallel='own'",
        "a model of your own, Workload(parallelize=...)",
    ),
    Rule(
        lambda case: not case.compile or WAYS[case.parallel].compiles,
        "parallel={case.parallel!r} runs uncompiled",
        "compile=False; parallel='fsdp2' shards weights too, and runs compiled",
    ),
    Rule(
        lambda case: case.tokens is None or case.tokens[0] % case.gpus == 0,
        "batch of a case on several GPUs",
        "a number of sequences that {case.gpus} ranks can share evenly",
        "batch={case.tokens[0]}",
    ),
    Rule(
        lambda case: case.checkpoint_formats and {*case.checkpoint_formats} <= {*CHECKPOINT_FORMATS, OWN_STORE},
        "checkpoint_formats of a case",
        f"some of {(*CHECKPOINT_FORMATS, OWN_STORE)}",
        "{case.checkpoint_formats}",
        R.BAD_VALUE,
    ),
)


def _known(what: str, value: str, known: Sequence[str], otherwise: str = "") -> None:
    """Raise :class:`SettingsError` for a name that is not known."""
    if value not in known:
        refuse_unknown(R.UNKNOWN_NAME, f"unknown {what} {value!r}", value, known, otherwise)


def field_value(name: str, value: Any) -> Any:
    """``value`` as the field ``name`` of a case has it. Raises :class:`SettingsError` for one that it cannot have."""
    what = EXPECTED[Case.__annotations__[name].removesuffix(" | None")]
    what, within = WITHIN.get(name, (what, lambda _: True))
    try:
        # A list becomes a tuple.
        found = plain_value(types_of(Case)[name], value, name)
        sound = found is None or within(found)
    except PlainDataError:
        sound = False
    if not sound:
        refuse(R.BAD_VALUE, f"{name} of a case", expected=what, seen=f"{value!r:.80}, a {type(value).__name__}")
    return found


def writable(part: str) -> str:
    """A part of a case's id in letters, digits, ``-``, ``_`` and ``.``, which file systems, ``-k`` and shells take. A
    part with other signs also gets six digits of its hash, so that ``größe`` and ``grüße`` stay two names.

    >>> writable("own.vit"), writable("own.a b")
    ('own.vit', 'own.a_b.454b88')
    """
    folded = re.sub(r"[^A-Za-z0-9._-]", "_", part)
    if folded == part:
        return part
    # A name may hold half a surrogate pair, which UTF-8 alone cannot encode.
    return f"{folded}.{hashlib.sha256(part.encode(errors='surrogatepass')).hexdigest()[:6]}"
