"""Inside the script's process: its models, optimizers and settings as plain data. Foreign objects are only looked at.

``type(one)`` and not ``isinstance``: a proxy answers ``isinstance`` with its referent's class, and some run code or
warn when asked.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

WRAPPERS = ("module", "base_layer")
"""Parts of names that wrappers add. Those of compilers, sharding and Lightning begin with an underscore."""
FP8_CLASSES = ("Float8", "FP8", "Fp8", "MXFP8", "NVFP4")
TE = "transformer_engine."


def objects(kinds: Sequence[type] = (), names: Sequence[str] = ()) -> Iterator[Any]:
    """Living objects of these classes, or of classes of these names."""
    for each in gc.get_objects():
        kind = type(each)
        if (kinds and issubclass(kind, tuple(kinds))) or kind.__name__ in names:
            yield each


def root_modules(besides: Sequence[Any] = ()) -> list[Any]:
    """Modules that train and lie in no other one, the largest first."""
    modules = list(objects([torch.nn.Module]))
    inside = {id(child) for module in modules for child in module._modules.values()}
    known = set(map(id, besides))
    roots = [module for module in modules if id(module) not in inside and id(module) not in known]
    return [root for root in roots if any(parameter.requires_grad for parameter in root.parameters())]


def profiles_itself() -> bool:
    """Whether the script has a profiler. A second one would start without an error and empty the first."""
    if torch._C._autograd._profiler_enabled():
        return True
    return any(map(_unfinished, objects([torch.profiler.profile, torch.autograd.profiler.profile])))


def _unfinished(profiler: Any) -> bool:
    """One without a schedule has finished where it has results."""
    schedule = getattr(getattr(profiler, "schedule", None), "__name__", "_default_schedule_fn")
    inner = getattr(profiler, "profiler", profiler)
    return schedule != "_default_schedule_fn" or getattr(inner, "kineto_results", None) is None


def stepped_by(optimizers: Iterable[Any]) -> list[Any]:
    """The parameters that they step."""
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def trained(roots: Sequence[Any], optimizers: Iterable[Any]) -> list[Any]:
    """Of several trees of modules those that an optimizer trains: a layer that was replaced may still be kept. Where
    sharding has replaced all parameters, all of them."""
    ids = set(map(id, stepped_by(optimizers)))
    return [root for root in roots if any(id(parameter) in ids for parameter in root.parameters())] or list(roots)


def model_told(roots: Sequence[Any], optimizers: Sequence[Any]) -> dict[str, Any]:
    """Layers, optimizers and settings."""
    stepped, chosen = stepped_by(optimizers), trained(roots, optimizers)
    ids = set(map(id, stepped))
    layers, seen = [], set[int]()
    for root in chosen:
        for layer, module in layers_of(root, ids):
            if id(module) not in seen:
                layers.append(layer)
        seen |= {id(module) for module in root.modules()}
    everything = {id(parameter) for root in roots for parameter in root.parameters()}
    return {
        "parameters": sum(parameter.numel() for root in chosen for parameter in root.parameters()),
        "optimizers": [type(each).__name__ for each in optimizers],
        "layers": layers,
        # Parameters that are stepped and have no module and no gradient: those of layers that were replaced.
        "orphans": [list(p.shape) for p in stepped if id(p) not in everything and p.grad is None],
        "evaluating": [type(root).__name__ for root in chosen if not root.training],
        **settings_told(chosen),
    }


def layers_of(root: Any, stepped: set[int]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each weight that a product may take, as its inputs and outputs, with its module."""
    for order, (name, module) in enumerate(root.named_modules()):
        if "base_layer" in module._modules:
            continue
        for own, weight, inputs, outputs, sure in weights_of(module):
            yield (
                {
                    "name": plain_name(f"{name}.{own}" if own else name) or type(module).__name__,
                    "in": inputs,
                    "out": outputs,
                    "sure": sure,
                    "dtype": str(weight.dtype).removeprefix("torch."),
                    "fp8_layer": is_fp8_layer(module, weight),
                    "trained": bool(weight.requires_grad),
                    "stepped": id(weight) in stepped,
                    "gradient": has_gradient(weight),
                    "adapter": ".lora_" in f".{name}",
                    "order": order,
                },
                module,
            )


def weights_of(module: Any) -> Iterator[tuple[str, Any, int, int, bool]]:
    """(its name inside the module, weight, inputs, outputs, whether that is which)."""
    kind = type(module).__name__
    weight = module._parameters.get("weight", getattr(module, "weight", None))
    if all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features")):
        if hasattr(weight, "dtype"):
            yield "", weight, module.in_features, module.out_features, True
    elif kind == "Conv1D" and hasattr(module, "nf"):
        yield "", weight, weight.shape[0], module.nf, True
    elif not any(word in kind for word in ("Embedding", "Conv")):
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() in (2, 3):
                yield own, parameter, parameter.shape[-1], parameter.shape[-2], False


def has_gradient(weight: Any) -> bool:
    """Whether a weight took part in the last step, as far as its gradient tells. Megatron's is kept elsewhere, that of
    a view of FSDP's flat parameter with it, and what a shard holds says nothing of the others."""
    if not weight.is_leaf or hasattr(weight, "main_grad"):
        return True
    plain = type(weight.grad) is torch.Tensor and weight.grad.layout is torch.strided
    return bool((weight.grad != 0).any()) if plain else weight.grad is not None


def plain_name(name: str) -> str:
    parts = [part for part in name.split(".") if not part.startswith("_") and part not in WRAPPERS]
    return ".".join(parts) or name


def is_fp8_layer(module: Any, weight: Any) -> bool:
    """Whether class or weight say that the layer is meant to multiply in FP8. That it does, only products show."""
    kinds = (type(module).__name__, type(weight).__name__, type(getattr(weight, "data", None)).__name__)
    return type(module).__module__.startswith(TE) or any(word in kind for kind in kinds for word in FP8_CLASSES)


def settings_told(roots: Sequence[Any]) -> dict[str, Any]:
    """Which precision was asked for in the libraries that decide it, and what their own state says is in force."""
    settings: dict[str, Any] = {}
    state = sys.modules.get("accelerate.state")
    if state is not None:
        settings["accelerate"] = str(state.AcceleratorState._shared_state.get("_mixed_precision", ""))
    for each in objects(names=["TrainingArguments", "SFTConfig", "Seq2SeqTrainingArguments"]):
        settings["arguments"] = [name for name in ("bf16", "fp16") if getattr(each, name, None) is True]
    libraries = ("torchao.float8", "transformer_engine.pytorch", "accelerate", "transformers", "deepspeed", "peft")
    settings["libraries"] = [name for name in libraries if name in sys.modules]
    configs = [getattr(module, "config", None) for root in roots for module in root.modules() if is_torchao(module)]
    settings["torchao"] = sorted(set(map(str, configs)))
    return {"settings": settings}


def is_torchao(module: Any) -> bool:
    return type(module).__module__.startswith("torchao.float8")


def recipes_in_force(roots: Iterable[Any]) -> dict[str, int]:
    """Recipe -> number of Transformer Engine's layers whose last forward pass used it."""
    found: dict[str, int] = {}
    for module in [module for root in roots if root is not None for module in root.modules()]:
        meta = getattr(module, "fp8_meta", None)
        if type(module).__module__.startswith(TE) and isinstance(meta, dict):
            recipe = meta.get("recipe")
            said = f"{type(recipe).__name__}({recipe})" if getattr(module, "fp8", False) else "off"
            found[said] = found.get(said, 0) + 1
    return found
