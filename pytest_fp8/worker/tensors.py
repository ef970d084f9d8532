"""A model's tensors: by the plain model's names, whole or in shards, and their digests.

A fused layer keeps q, k and v as rows of one weight. Under the plain names it is three views of that weight, which are
saved, loaded and compared like any other weights without a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from pytest_fp8.backends.base import PARTS

# -- names ------------------------------------------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """A name without the prefixes that wrappers inside the model add: torch.compile, activation checkpointing.

    >>> plain_name("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    # Private: the attributes of torch's two wrappers, which their own state dicts leave out.
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


def parts(name: str, value: Any, of: Any = None) -> Iterator[tuple[str, Any]]:
    """(plain name, value) of each of the plain model's parameters that this one holds: nearly always one. Those of a
    fused one are views of its rows. ``of``: the parameter where ``value`` is its gradient, or what is kept for it."""
    name = plain_name(name)
    owner, _, kind = name.rpartition(".")
    inside = getattr(value if of is None else of, PARTS, None)
    if inside is None:
        yield name, value
    for part, rows in inside or ():
        piece = value
        if isinstance(value, torch.Tensor):
            # A scalar, such as a count of steps, is copied for each part: safetensors refuses shared memory.
            piece = value[rows] if value.dim() else value.clone()
        yield ".".join(each for each in (owner.rpartition(".")[0], part, kind) if each), piece


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The live parameters by plain names, a tied one under each of its names."""
    live = model.named_parameters(remove_duplicate=False)
    return dict(part for name, value in live for part in parts(name, value))


def join(values: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Values by the model's own names, from those by plain names. What is no tensor is the same for each part."""
    found = dict(values)
    whole: dict[str, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        pieces = [found.pop(part) for part, _ in parts(name, parameter) if hasattr(parameter, PARTS) and part in found]
        if pieces:
            joined = isinstance(pieces[0], torch.Tensor) and pieces[0].dim()
            whole[plain_name(name)] = torch.cat(pieces) if joined else pieces[0]
    return {**found, **whole}


def trained(model: torch.nn.Module, optimizer: Any) -> list[str]:
    """Plain names of the parameters that the optimizer steps; a tied parameter counts under each of its names."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    live = model.named_parameters(remove_duplicate=False)
    return sorted(part for name, value in live if id(value) in stepped for part, _ in parts(name, value))


def foreign(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The parameters that the optimizer steps and the model does not have: master copies, or another model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]


# -- how a rank holds a tensor ----------------------------------------------------------------------------------------


class Held:
    """A tensor as this rank holds it: all of it, in its own memory. A way to share tensors among ranks overrides what
    is otherwise, and adds itself to :data:`KINDS`.

    What gathers, every rank must call for the same tensors in the same order.
    """

    is_part = False
    """Whether this rank holds a part of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: Any = tensor

    @classmethod
    def has(cls, tensor: Any) -> bool:
        """Whether a tensor is held in this way."""
        return True

    @property
    def is_ranks_own(self) -> bool:
        """Whether each rank may have other numbers, of which torch does not know: a part of Megatron's column and row
        parallel layers, by the attribute that Megatron sets, and Transformer Engine on weights that are whole, too."""
        return bool(getattr(self.tensor, "tensor_model_parallel", False)) and torch.distributed.is_initialized()

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.tensor.shape  # type: ignore[no-any-return]

    def local(self) -> torch.Tensor:
        """This rank's numbers: a write to them changes the tensor."""
        return self.tensor  # type: ignore[no-any-return]

    def stored(self) -> torch.Tensor:
        """The tensor as a checkpoint's writer takes it, sharing its memory."""
        return self.tensor  # type: ignore[no-any-return]

    def whole(self) -> torch.Tensor:
        """All of it; gathers."""
        return self.tensor  # type: ignore[no-any-return]

    def copied(self) -> torch.Tensor:
        """A copy that :meth:`fill` takes; may gather."""
        return self.stored().detach().clone()

    def gradient(self) -> torch.Tensor | None:
        """This rank's part of its gradient, between backward pass and step."""
        return self.tensor.grad  # type: ignore[no-any-return]

    def whole_gradient(self) -> torch.Tensor | None:
        """All of it, detached; gathers."""
        return None if self.tensor.grad is None else held(self.tensor.grad.detach()).whole()

    @torch.no_grad()
    def fill(self, value: torch.Tensor) -> None:
        """Give it the values of a whole tensor, or of a copy of it; on every rank at once."""
        self.tensor.copy_(value)

    @torch.no_grad()
    def change(self, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put in place of its numbers what ``changed`` makes of them: of this rank's, or on every rank the same of the
        whole."""
        local = self.local()
        local.copy_(changed(local))

    def loaded(self, value: torch.Tensor) -> torch.Tensor:
        """What ``load_state_dict()`` is given in its place, to hold a whole tensor's values; on every rank at once."""
        return value


class Sharded(Held):
    """As a ``DTensor``."""

    is_part = True

    @classmethod
    def has(cls, tensor: Any) -> bool:
        # Its module takes a second to load, and is not loaded where nothing is sharded.
        module = sys.modules.get("torch.distributed.tensor")
        return module is not None and isinstance(tensor, module.DTensor)

    @torch.no_grad()
    def local(self) -> torch.Tensor:
        """Without torchao's wrapper for FSDP2."""
        part: torch.Tensor = self.tensor.detach().to_local()
        while hasattr(part, "__tensor_flatten__") and len(part.__tensor_flatten__()[0]) == 1:
            part = getattr(part, part.__tensor_flatten__()[0][0])
        return part

    def stored(self) -> torch.Tensor:
        """Without torchao's wrapper for FSDP2."""
        from torch.distributed.tensor import DTensor

        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        sizes = {"shape": self.tensor.shape, "stride": self.tensor.stride()}
        return DTensor.from_local(self.local().detach(), mesh, placements, run_check=False, **sizes)

    def whole(self) -> torch.Tensor:
        return self.stored().full_tensor()  # type: ignore[attr-defined,no-any-return]

    @torch.no_grad()
    def fill(self, value: torch.Tensor) -> None:
        self.local().copy_(held(self.loaded(value)).local())

    def loaded(self, value: torch.Tensor) -> torch.Tensor:
        if self.has(value):
            return value
        from torch.distributed.tensor import distribute_tensor

        # Every rank has the whole tensor, so none is sent.
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        return distribute_tensor(value.to(self.tensor.device), mesh, placements, src_data_rank=None)


KINDS: list[type[Held]] = [Sharded]
"""How ranks share tensors; any other tensor is held whole."""
BY_LIBRARY = {"deepspeed": "pytest_fp8.backends.zero"}
"""Library -> the module that adds a kind once the library is loaded: a user's own script or set-up may use it, too."""


def held(tensor: torch.Tensor) -> Held:
    for library, module in BY_LIBRARY.items():
        if library in sys.modules and module not in sys.modules:
            import_module(module)
    return next((kind for kind in KINDS if kind.has(tensor)), Held)(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """A parameter with plain numbers, or one of which this rank's part is plain numbers."""
    with torch.no_grad():
        kind = type(tensor.detach().to_local()) if Sharded.has(tensor) else type(tensor)  # type: ignore[attr-defined]
    return kind in (torch.Tensor, torch.nn.Parameter)


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a sparse gradient; any other as it is."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


# -- copies in the host's memory --------------------------------------------------------------------------------------

STAGE_BYTES = 1 << 26
"""Of the page-locked buffer."""


def on_host(tensors: Mapping[str, torch.Tensor], device: str = "cuda") -> dict[str, torch.Tensor]:
    """The same values in the host's memory; shards, and what is not on the ``device``, as they are.

    They go through a small page-locked buffer, and several cores then copy it on. Left to the driver, one core copies
    into pages that are new to it: 2 GiB from an H100 took 1.53 s by the driver, 0.04 s into page-locked memory."""
    stage: torch.Tensor | None = None
    found = dict(tensors)
    for name, tensor in tensors.items():
        # Of these alone the bytes are the values.
        whole = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if tensor.device.type != device or not whole or tensor.is_nested or tensor.is_quantized:
            continue
        if stage is None:
            stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        # A single element is contiguous at any stride, but for this view.
        source = flat.as_strided(flat.shape, (1,)).view(torch.uint8)
        copy = torch.empty(source.shape, dtype=torch.uint8)
        for part, target in zip(source.split(STAGE_BYTES), copy.split(STAGE_BYTES), strict=True):
            through = stage[: part.numel()]
            through.copy_(part)
            target.copy_(through)
        found[name] = copy.view(tensor.dtype).reshape(tensor.shape)
    return found


# -- samples ---------------------------------------------------------------------------------------------------------

MANY = 2**16
"""Values of a tensor. The standard error of a share of them is below 0.002; at 8B the copies are 38 MB of bfloat16."""


@contextmanager
def unwatched() -> Iterator[None]:
    """What is computed inside is no part of the step."""
    # Private: torch has no public way to compute past the modes that record operators.
    with torch.no_grad(), _disable_current_modes():
        yield


def values(tensor: torch.Tensor, most: int = MANY) -> torch.Tensor:
    """About ``most`` of this rank's values of a tensor, evenly spread, as a view; all where there are fewer than twice
    as many."""
    tensor = held(tensor).local()
    while is_traceable_wrapper_subclass(tensor):
        # torchao's wrapper of a weight keeps the weight itself first; a weight that is stored in FP8, its FP8 values,
        # and it knows no reshape.
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and flat.element_size() == 1:
        flat = flat.view(torch.uint8)
    # An odd stride meets every column of a matrix whose width is a power of two.
    return flat[:: max(1, flat.numel() // most) | 1]


# -- digests ----------------------------------------------------------------------------------------------------------


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A content digest of each tensor: equal bits give equal numbers on any device. It depends on the positions of the
    elements; modulo 2^64."""
    result = {}
    for name, tensor in tensors.items():
        flat = held(tensor).whole().detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        # Of 8 bytes at once, sign bits would fall out of the sum.
        whole = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
        total = 0
        for start in range(0, whole.numel(), 1 << 24):
            part = whole[start : start + (1 << 24)].to(torch.int64)
            weight = torch.arange(start + 1, start + 1 + part.numel(), device=part.device) % 65_521 + 1
            total = (total + int((part * weight).sum())) % (1 << 64)
        result[name] = total
    return result
