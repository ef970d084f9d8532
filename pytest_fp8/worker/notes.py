"""Notes of an arm's parameters, buffers, optimizer and torch's global switches, as plain data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from pytest_fp8.libraries import library_versions
from pytest_fp8.questions.ledger.evidence import OptimizerNote, Weight
from pytest_fp8.worker.record.operators import dtype_name
from pytest_fp8.worker.tensors import digests, held, parts
from pytest_fp8.worker.training.step import innermost, schedule_of, schedule_state

TIME = ("lr_scheduler", "optimizer", "_get_lr_called_within_step", "_initial_step")


def process_facts() -> dict[str, Any]:
    """Versions of libraries and, of a process that uses a GPU, bytes of its memory."""
    on_gpu, cudnn = torch.cuda.is_initialized(), None
    # torch does not tell it where Transformer Engine has loaded another one than torch was built for.
    with suppress(RuntimeError):
        cudnn = torch.backends.cudnn.version() if on_gpu else None
    facts: dict[str, Any] = {"libraries": library_versions(), "cudnn": cudnn}
    if on_gpu:
        facts["memory"] = {"allocated": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_reserved()}
    return facts


@torch.no_grad()
def weights_of(model: torch.nn.Module) -> dict[str, Weight]:
    """Every parameter and buffer under its plain name; takes a digest of each and keeps no copy."""
    live: list[tuple[str, torch.Tensor, bool]]
    live = [(name, value, False) for name, value in model.named_parameters(remove_duplicate=False)]
    live += [(name, value, True) for name, value in model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    seen: dict[int, str] = {}
    result: dict[str, Weight] = {}
    for name, value, buffer in live:
        for plain, tensor in parts(name, value):
            # A part of a fused parameter is a tensor of its own, made anew in each call.
            key = id(value) if tensor is value else hash((id(value), plain))
            if key not in seen:
                seen[key] = _digest(tensor)
            holder = first.setdefault(key, plain)
            result[plain] = Weight(
                shape=shape_of(tensor),
                dtype=dtype_name(tensor),
                digest=seen[key],
                trained=value.requires_grad,
                hooks=_hooks(value),
                same_as=holder if holder != plain else "",
                buffer=buffer,
            )
    return result


def untied(before: Mapping[str, Weight], after: Mapping[str, Weight]) -> dict[str, str]:
    """Weight that was another one's second name before the conversion and no longer is -> that other weight.

    A conversion that copies weights into new layers does this: a tied head becomes a parameter of its own, which an
    optimizer that was made before does not hold.
    """
    return {name: w.same_as for name, w in before.items() if w.same_as and name in after and not after[name].same_as}


def _digest(tensor: torch.Tensor) -> str:
    """Of a tensor that is wrapped for a later cast, the digest of the one inside; empty for one in FP8, and for one of
    which each rank holds another part."""
    if held(tensor).is_part or held(tensor).is_ranks_own:
        return ""
    while hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        if len(names) != 1:
            return ""
        tensor = getattr(tensor, names[0])
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or (
        tensor.element_size() < 2 and tensor.is_floating_point()
    ):
        return ""
    return digest_of(tensor.detach())


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of the whole tensor; a ragged size is -1."""
    return tuple(size if isinstance(size, int) else -1 for size in held(tensor).shape)


def digest_of(tensor: torch.Tensor) -> str:
    """16 hex digits of a tensor's content; empty for one whose elements are no plain numbers in its own memory."""
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout != torch.strided or tensor.device.type == "meta":
        return ""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_quantized or tensor.is_nested:
        return ""
    return f"{digests({'': tensor})['']:016x}" if tensor.numel() else "0"


def _hooks(value: torch.Tensor) -> int:
    return sum(len(getattr(value, name, None) or ()) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def optimizer_note(optimizer: Any, model: torch.nn.Module) -> OptimizerNote:
    """Class, settings of each group and which parameters it holds; the schedule's class and state."""
    inner = innermost(optimizer)
    names: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).extend(part for part, _ in parts(name, value))
    members: dict[str, int] = {}
    for index, group in enumerate(inner.param_groups):
        for number, parameter in enumerate(group["params"]):
            for name in names.get(id(parameter), [f"(parameter {number} of group {index}, not of the model)"]):
                members[name] = index
    groups = [{key: words(value) for key, value in group.items() if key != "params"} for group in inner.param_groups]
    return OptimizerNote(type(inner).__qualname__, groups, members, _schedule(inner))


def _schedule(optimizer: Any) -> dict[str, str]:
    schedule = schedule_of(optimizer)
    if schedule is None:
        return {}
    state = {key: words(value) for key, value in schedule_state(schedule).items() if key not in TIME}
    return {"class": type(schedule).__qualname__, **state}


def words(value: Any) -> str:
    """A setting in words that are equal in every process: no addresses."""
    if isinstance(value, torch.Tensor):
        return words(value.tolist())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool | int | str | type(None)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(words(part) for part in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {words(part)}" for key, part in value.items()) + "}"
    return type(value).__qualname__


def random_state() -> str:
    """Digest of torch's generators, of the CPU and of the current GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return hashlib.sha256(b"".join(bytes(state.numpy().tobytes()) for state in states)).hexdigest()[:16]


# -- global switches --------------------------------------------------------------------------------------------------

SWITCHES = (
    "get_float32_matmul_precision()",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "are_deterministic_algorithms_enabled()",
    "get_default_dtype()",
    "is_anomaly_enabled()",
    "backends.cuda.flash_sdp_enabled()",
    "backends.cuda.mem_efficient_sdp_enabled()",
    "backends.cuda.cudnn_sdp_enabled()",
)
"""Of torch: attributes, and functions without arguments."""
AUTOCAST = "autocast"
"""Begins the names of autocast's switches."""


def switches_of(device: torch.device) -> dict[str, str]:
    """Switch -> its value. One that this torch does not have, or refuses to read, is left out."""
    read: dict[str, str] = {}
    for name in SWITCHES:
        # torch refuses to read TF32's old switches where its new ones were set.
        with suppress(AttributeError, RuntimeError):
            value: Any = torch
            for part in name.removesuffix("()").split("."):
                value = getattr(value, part)
            read[f"torch.{name}"] = str(value() if name.endswith("()") else value)
    if device.type == "cpu":
        read["torch.get_num_threads()"] = str(torch.get_num_threads())
    on = torch.is_autocast_enabled(device.type)
    read[f"{AUTOCAST} on {device.type}"] = str(torch.get_autocast_dtype(device.type)) if on else "off"
    return read
