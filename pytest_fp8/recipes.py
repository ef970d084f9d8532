"""How FP8 is scaled: the recipes by name, the roles that each promises in FP8, and what each needs. Plain data.

Sources: torchao ``Float8LinearRecipeName``; Transformer Engine ``transformer_engine.common.recipe``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse, refuse_unknown

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
    """What a recipe promises, and which options users set on it."""

    backend: str
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


POWERS = "round_scales_to_power_of_2"
_FORMAT = {"fp8_format": "HYBRID"}
DEFAULT_RECIPE = "tensorwise"
"""What a mark without ``recipe=`` means."""
_TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_HIGH_PRECISION_WGRAD = (FPROP, DGRAD)
# Accelerate's own defaults: its algorithm is "most_recent" where Transformer Engine's is "max".
_ACCELERATE = {**_FORMAT, "amax_history_len": 1024, "amax_compute_algo": "most_recent", "margin": 0}
_DELAYED = {**_FORMAT, "amax_history_len": 1024, "amax_compute_algo": "max", "margin": 0}
_RECIPES = [
    RecipeFacts("bf16", "none", roles=()),
    # Weights are gathered in FP8 under FSDP2; torchao has it for scales of whole tensors alone.
    RecipeFacts("torchao", "tensorwise", switches=("float8_all_gather", "precompute_scale", POWERS)),
    RecipeFacts("torchao", "rowwise", minimum_capability=(9, 0)),
    # "gw_hp": the weight gradient stays in high precision, by design.
    RecipeFacts("torchao", "rowwise_with_gw_hp", roles=_HIGH_PRECISION_WGRAD, minimum_capability=(9, 0)),
    *(
        facts
        for backend in ("transformer_engine", "te_fused")
        for facts in (
            RecipeFacts(backend, "delayed", options=_DELAYED),
            RecipeFacts(backend, "current", options=_FORMAT),
            # Block scaling on Hopper needs cuBLAS's 128-wide block kernels; Blackwell offers MXFP8 instead.
            RecipeFacts(backend, "block", options={"fp8_format": "E4M3"}, only_capabilities=(9,)),
        )
    ),
    RecipeFacts("transformer_engine", "mxfp8", options={"fp8_format": "E4M3"}, minimum_capability=(10, 0)),
    # Accelerate takes torchao's recipes in a config object, and of Transformer Engine's recipes only the delayed one.
    # The Trainer takes no config object: Accelerate makes its default, which wraps weights for FSDP2.
    *(
        RecipeFacts(
            f"{library}_torchao",
            recipe,
            roles=_HIGH_PRECISION_WGRAD if recipe == "rowwise_with_gw_hp" else ROLES,
            options={"fp8_all_gather": True} if library == "trainer" else {},
            minimum_capability=(8, 9) if recipe == "tensorwise" else (9, 0),
        )
        for library, recipes in (("accelerate", _TORCHAO), ("trainer", ("tensorwise",)))
        for recipe in recipes
    ),
    *(RecipeFacts(f"{library}_te", "delayed", options=_ACCELERATE) for library in ("accelerate", "trainer")),
    # FP8 weights that stay frozen: the forward product is FP8, the backward one runs on weights cast back to BF16.
    RecipeFacts("unsloth", "rowwise", roles=(FPROP,), minimum_capability=(9, 0)),
    RecipeFacts("unsloth_te", "delayed", options=_ACCELERATE),
    RecipeFacts("unsloth_bf16", "none", roles=()),
    RecipeFacts("accelerate_bf16", "none", roles=()),
]
RECIPES: dict[tuple[str, str], RecipeFacts] = {(facts.backend, facts.name): facts for facts in _RECIPES}
BACKENDS: tuple[str, ...] = tuple(dict.fromkeys(facts.backend for facts in _RECIPES))

SHORT_BACKENDS = {
    "transformer_engine": "te",
    "te_fused": "te.fused",
    "accelerate_te": "accelerate.te",
    "accelerate_torchao": "accelerate.torchao",
    "accelerate_bf16": "accelerate.bf16",
    "trainer_te": "trainer.te",
    "trainer_torchao": "trainer.torchao",
    "unsloth_te": "unsloth.te",
    "unsloth_bf16": "unsloth.bf16",
}
"""Backend -> its name in the ids of cases, which a case takes for its backend as well."""
FULL_BACKENDS = {short: backend for backend, short in SHORT_BACKENDS.items()}

LIBRARIES = {
    "te_fused": "transformer_engine",
    "accelerate_te": "transformer_engine",
    "trainer_te": "transformer_engine",
    "accelerate_torchao": "torchao",
    "trainer_torchao": "torchao",
    "unsloth": "torchao",
    "unsloth_te": "transformer_engine",
}
"""Backend -> the library whose FP8 it runs, where the backend has another name."""

PARALLEL = ("ddp", "fsdp2", "zero3", "own")
"""How an arm of several ranks trains; ``own``: as the workload's ``parallelize`` says."""
PARALLEL_BACKENDS = {
    **dict.fromkeys(("bf16", "torchao", "transformer_engine"), PARALLEL),
    **dict.fromkeys(("accelerate_torchao", "accelerate_bf16"), ("ddp", "fsdp2", "zero3")),
}
"""Backend -> how it trains on several GPUs. Accelerate does it itself, by its own plugins."""
SHARDED_REFERENCES = {"accelerate_torchao": "accelerate_bf16"}
"""Backend -> the backend of its BF16 reference on several GPUs: Accelerate keeps float32 weights there."""

_VALUES: dict[str, tuple[str | bool, ...] | int] = {
    "amax_history_len": 1,
    "margin": 0,
    "fp8_format": ("HYBRID", "E4M3"),
    "amax_compute_algo": ("max", "most_recent"),
    "fp8_all_gather": (True, False),
    "float8_all_gather": (True, False),
    "precompute_scale": (True, False),
    POWERS: (True, False),
}
"""Option -> its values, or the least whole number."""


def recipe_facts(backend: str, name: str) -> RecipeFacts:
    """The facts of a recipe; raises :class:`SettingsError` naming the known ones."""
    if backend not in BACKENDS:
        refuse_unknown(
            R.UNKNOWN_NAME,
            f"unknown FP8 backend {backend!r}",
            backend,
            [*BACKENDS, *FULL_BACKENDS],
            "backend='torchao' or backend='transformer_engine' ('te') for a model in plain PyTorch",
            takes_list="backend",
        )
    facts = RECIPES.get((backend, name))
    if facts is None:
        others = [owner for owner, recipe in RECIPES if recipe == name]
        refuse_unknown(
            R.UNKNOWN_NAME,
            f"backend {backend!r} has no recipe {name!r}",
            name,
            recipes_of(backend),
            f"recipe={recipes_of(backend)[0]!r}"
            + (f", or backend={others[0]!r}, which has {name!r}" if others else ""),
            cause=f"a mark without recipe= means {name!r}, a recipe of {others[0]}" if name == DEFAULT_RECIPE else "",
            takes_list="recipe",
        )
    return facts


def recipes_of(backend: str) -> list[str]:
    """The names of a backend's recipes."""
    return [recipe for owner, recipe in RECIPES if owner == backend]


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

    Raises :class:`SettingsError` for an option the recipe does not have or a value it cannot take.
    """
    facts = recipe_facts(backend, name)
    for option, value in given.items():
        if option not in facts.options and option not in facts.switches:
            known = [*facts.options, *facts.switches]
            refuse_unknown(
                R.UNKNOWN_NAME, f"recipe {name!r} of {backend!r} has no option {option!r}", option, known, "options={}"
            )
        # Of a backend of somebody else's the backend itself looks at its options.
        values = _VALUES.get(option, (value,))
        if isinstance(values, int):
            sound, expected = type(value) is int and value >= values, f"a whole number from {values}"
        else:
            # 1 is equal to True and has another name in the case's id.
            sound = any(type(value) is type(one) and value == one for one in values)
            expected = " or ".join(map(str, values))
        if not sound:
            refuse(R.BAD_VALUE, f"option {option!r} of recipe {name!r}", expected=expected, seen=repr(value))
    return {**facts.options, **{name: value for name, value in given.items() if value or name not in facts.switches}}
