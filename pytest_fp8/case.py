"""A case: what both arms of a pair train and how FP8 is switched on, as a frozen value with an id and a hash.

>>> case = Case(model="1b", backend="transformer_engine", recipe="current")
>>> case.id
'1b-te-current'
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse, refuse_unknown
from pytest_fp8.plain import PlainDataError, plain_value, types_of
from pytest_fp8.recipes import PARALLEL, backend_type, known_backend, recipe_facts, recipe_options, types
from pytest_fp8.zoo.shapes import SHAPES

OWN = "own"
"""The model name of a case whose model comes from the user's ``fp8_workload`` fixture."""

DEFINITION = 2
"""Part of the hash: raised where what a case trains changes and no field says so. How figures are taken is
:data:`pytest_fp8.baselines.record.MEASUREMENT`, which each session stores: raising that throws no history away."""

QUESTIONS = ("layers", "numerics", "loss", "speedup", "memory", "checkpoints")
CHIPS = ("hopper", "blackwell", "ada")

CHECKPOINT_FORMATS = ("safetensors", "dcp")
OWN_STORE = "own"
"""The store that is a workload's own ``save()`` and ``load()``."""

SUITE_ALONE = {
    "batch": "the workload's batch(step) gives as many rows as you train with",
    "seq": "the workload's batch(step) gives sequences as long as you train with",
    "weights": "load them in the workload's build()",
}
"""Field that a user's own model has no use for -> what to do instead."""
EXAMPLES = {
    "str": ("a text", "'...'"),
    "bool": ("True or False", "True or False"),
    "int": ("a whole number", "1"),
    "float": ("a number", "1.0"),
    "tuple[str, ...]": ("a tuple of texts", "('...',)"),
    "Mapping[str, Any]": ("a dict with names as keys", "{'...': ...}"),
}
"""A field's annotation -> what a message calls it, and an example."""
WITHIN: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: ("a whole number from 1", lambda n: n >= 1) for name in ("batch", "seq", "loss_steps", "loss_seeds")},
    "tolerance": ("a fraction between 0 and 1", lambda loss: 0 < loss < 1),
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
    weights: str | None = None
    """A local folder of weights; ``None`` means random weights from a seed."""
    lora: int = 0
    """Rank of the LoRA adapters, which are then all that is trained; 0 trains all weights."""
    lora_targets: tuple[str, ...] = ()
    """Names of the Linears that get adapters; empty: all of a block's."""
    name: str = ""
    """Tells a user's own models apart: ``own.vit``."""
    loss_steps: int | None = None
    """Steps of one loss curve; ``None``: the model's default."""
    loss_seeds: int | None = None
    """Seeds that the loss question starts with; ``None``: the model's default."""
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
    slower_because: str = ""
    """*gate*: why FP8 is known not to beat BF16 here; the floor is then expected to fail, strictly."""

    def __post_init__(self) -> None:
        self._require_types()
        for name, instead in SUITE_ALONE.items():
            value = getattr(self, name)
            _agree(
                self.model != OWN or value is None,
                f"{name}= with a model of your own",
                f"no {name}=, which is for models of the suite",
                f"{name}={value!r:.80}",
                f"take it out of the mark; {instead}",
            )
        kind = known_backend(self.backend)
        object.__setattr__(self, "backend", kind.name)
        if self.emulated and not kind.emulates:
            self._refuse_emulation()
        full, defaults = self.full_options, recipe_facts(self.backend, self.recipe).options
        object.__setattr__(self, "options", {k: v for k, v in full.items() if v != defaults.get(k)})
        own = "leave model= out, and bring a model of your own with the fixture fp8_workload"
        _known("model", self.model, [*SHAPES, OWN], own, takes_list="model")
        if self.emulated:
            object.__setattr__(self, "questions", tuple(q for q in self.questions if q not in ("speedup", "memory")))
            object.__setattr__(self, "compile", False)
        _agree(
            self.lora > 0 or (self.lora == 0 and not self.lora_targets),
            "lora of a case",
            "a rank from 1 with its targets, or 0 and no targets",
            str(self.lora),
        )
        if kind.brings_model:
            self._require_adapters()
        own = "a name for a model of your own, with no model="
        _agree(not self.name or self.model == OWN, "name of a case", own, self.name)
        if self.chip:
            _known("chip", self.chip, CHIPS)
        for question in self.questions:
            _known("question", question, QUESTIONS)
        self._require_ranks()
        formats, known = self.checkpoint_formats, (*CHECKPOINT_FORMATS, OWN_STORE)
        if not formats or not {*formats} <= {*known}:
            refuse(R.BAD_VALUE, "checkpoint_formats of a case", expected=f"some of {known}", seen=repr(formats))

    def _require_types(self) -> None:
        """Raise :class:`SettingsError` for a field of another type: a person typed it in a mark. A list becomes a
        tuple, and a path a text."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "weights" and isinstance(value, os.PathLike):
                value = os.fspath(value)
            object.__setattr__(self, each.name, field_value(each.name, value))

    def _refuse_emulation(self) -> None:
        """Raise :class:`SettingsError` for a backend that runs on GPUs alone. The next step names a recipe where the
        case's is none of the backend's, as the default of a mark may be."""
        kind = backend_type(self.backend)
        has = [facts.name for facts in kind.recipes]
        on_gpu = f"backend={(kind.short or kind.name)!r}, recipe={(self.recipe if self.recipe in has else has[0])!r}"
        refuse(
            R.NOT_EMULATED,
            f"{self.backend!r} cannot be emulated",
            expected="torchao, alone or through Accelerate, whose numerics run on any processor",
            seen=self.backend,
            next_step=f"backend='torchao'; or without emulated=True, on a GPU: {on_gpu}",
        )

    def _require_ranks(self) -> None:
        """Raise :class:`SettingsError` for ranks that cannot train this case together."""
        _agree(
            self.gpus >= 1 and (self.gpus > 1) == bool(self.parallel),
            "gpus and parallel of a case",
            f"gpus=2 or more with parallel= one of {', '.join(PARALLEL)}; or neither",
            f"gpus={self.gpus!r}, parallel={self.parallel!r}",
            "parallel='fsdp2' beside gpus=2" if self.gpus > 1 else "gpus=2 beside parallel=, or neither",
        )
        gathers, precomputes = (self.options.get(name) for name in ("float8_all_gather", "precompute_scale"))
        wants = "FSDP2, whose gathers it casts: parallel='fsdp2' or 'own'"
        _agree(not gathers or self.parallel in ("fsdp2", "own"), "float8_all_gather", wants, self.id)
        wants = "float8_all_gather, whose scales it computes at once"
        _agree(not precomputes or gathers, "precompute_scale", wants, self.id)
        if not self.parallel:
            return
        _known("parallel", self.parallel, PARALLEL)
        able = [kind.name for kind in types() if self.parallel in kind.parallel]
        _agree(self.backend in able, f"backend under {self.parallel}", f"one of {', '.join(able)}", self.backend)
        wants = "a model of your own, Workload(parallelize=...)"
        _agree(self.parallel != "own" or self.model == OWN, "parallel='own'", wants, self.model)
        _agree(
            self.parallel != "zero3" or not self.compile,
            "parallel='zero3' is DeepSpeed's, which runs uncompiled",
            "compile=False",
            "compile=True",
            "parallel='fsdp2' shards weights too, and runs compiled",
        )
        sequences = self.tokens[0] if self.tokens is not None else 0
        _agree(
            sequences % self.gpus == 0,
            "batch of a case on several GPUs",
            f"a number of sequences that {self.gpus} ranks can share evenly",
            str(sequences),
            f"batch={self.gpus * max(1, sequences // self.gpus)}",
        )

    def _require_adapters(self) -> None:
        if not self.lora:
            refuse(
                R.ADAPTERS_ALONE,
                f"{self.backend!r} trains LoRA adapters alone",
                expected="lora= a rank from 1",
                seen="lora=0, which trains all weights",
                cause="Unsloth itself: `load_in_fp8` is not compatible with full finetuning"
                if self.backend == "unsloth"
                else "these arms draw, train and save Unsloth's adapters and nothing else",
                next_step="lora=16, or backend='torchao' to train all weights in FP8",
            )
        if self.model == OWN or self.activation_checkpointing or not self.compile:
            refuse(
                R.ADAPTERS_ALONE,
                f"{self.backend!r} builds and compiles its model itself",
                expected="a model of the suite, compile=True and activation_checkpointing=False",
                seen=f"model={self.model!r}, compile={self.compile}, "
                f"activation_checkpointing={self.activation_checkpointing}",
                cause="its kernels replace the model's forward pass, and neither of these works on top of them",
                next_step="leave these out of the case",
            )

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
            (self.weights is not None, "weights"),
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

    @property
    def horizon(self) -> int:
        """Steps of one loss curve."""
        return self.loss_steps or (SHAPES[self.model].loss_steps if self.model != OWN else 40)

    @property
    def seeds(self) -> int:
        """Seeds that the loss question starts with."""
        return self.loss_seeds or (SHAPES[self.model].loss_seeds if self.model != OWN else 4)

    def asks(self, question: str) -> bool:
        return question in self.questions

    @property
    def judged_by(self) -> tuple[Any, ...]:
        """The values of its *gate* fields: cases that differ in these alone share their arms and what these answer."""
        return tuple(getattr(self, name) for name in _GATE_FIELDS)

    def reference(self) -> Case:
        """The BF16 case with the same weights, data and seeds. It is compiled even where the FP8 arm is not, since FP8
        must beat the fastest BF16; a user's own model, which might not compile, and DeepSpeed's are compiled where the
        FP8 arm is."""
        compiled = self.compile or (self.model != OWN and self.parallel != "zero3")
        kind = backend_type(self.backend)
        reference = kind.reference_on_ranks if self.parallel else kind.reference
        return replace(self, backend=reference, recipe="none", options={}, compile=compiled)

    def digest(self, workload: str = "") -> str:
        """Hash of all that can change a number, 16 hex digits; ``workload``: the fingerprint of a user's own model."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _GATE_FIELDS + _LOSS_FIELDS}
        # Fields that are younger than the first baselines count where they are used, so that old hashes stay.
        for name, unused in _LATER_FIELDS.items():
            if content[name] == unused:
                del content[name]
        # Where a case may run changes no number. Stored hashes have this.
        content["chip"] = "hopper"
        content["options"] = self.full_options
        content["weights"] = self.weights is not None
        content["horizon"], content["seeds"] = self.horizon, self.seeds
        content["shape"] = SHAPES[self.model].describe() if self.model != OWN else workload
        content["measurement"] = DEFINITION
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "options": dict(self.options)}


_LATER_FIELDS: dict[str, Any] = {"lora": 0, "lora_targets": (), "name": "", "gpus": 1, "parallel": ""}
_GATE_FIELDS = ("questions", "tolerance", "floor", "slower_because", "checkpoint_formats", "resume")
_LOSS_FIELDS = ("loss_steps", "loss_seeds")
"""In a hash by what they come to: the model's defaults are theirs, too."""


def _agree(sound: Any, headline: str, expected: str, seen: str, next_step: str = "") -> None:
    """Raise :class:`SettingsError` unless the fields of a case agree."""
    if not sound:
        refuse(R.FIELDS_DISAGREE, headline, expected=expected, seen=seen, next_step=next_step)


def _known(what: str, value: str, known: Sequence[str], otherwise: str = "", takes_list: str = "") -> None:
    """Raise :class:`SettingsError` for a name that is not known."""
    if value not in known:
        refuse_unknown(R.UNKNOWN_NAME, f"unknown {what} {value!r}", value, known, otherwise, takes_list=takes_list)


def field_value(name: str, value: Any) -> Any:
    """``value`` as the field ``name`` of a case has it. Raises :class:`SettingsError` for one that it cannot have."""
    [default] = [each.default for each in fields(Case) if each.name == name]
    kind = Case.__annotations__[name].removesuffix(" | None")
    what, example = EXAMPLES[kind]
    what, within = WITHIN.get(name, (what, lambda _: True))
    try:
        found = plain_value(types_of(Case)[name], value, name)
        sound = found is None or within(found)
    except PlainDataError:
        sound = False
    if not sound:
        refuse(
            R.BAD_VALUE,
            f"{name} of a case",
            expected=what,
            seen=f"{value!r:.80}, a {type(value).__name__}",
            next_step=f"{name}={default!r}" if kind == "float" else f"{name}={example}",
        )
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
