"""The output of a model, whatever it is made of: the tensor that two arms compare, and what entered the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from pytest_fp8.worker.training.phases import Call, called, is_training_call, replaced_call
from pytest_fp8.zoo import data
from pytest_fp8.zoo.batch import tensors_in, with_tensors


def tensor_of(output: Any) -> torch.Tensor | None:
    """The tensor to compare: the output itself, its logits, or its largest tensor of floating-point numbers."""
    if isinstance(output, torch.Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    tensors = list(tensors_in(output))
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return max(floating or tensors, key=torch.Tensor.numel, default=None)


@contextmanager
def inputs_noted(model: torch.nn.Module) -> Iterator[list[int]]:
    """A fingerprint of the tensors that enter the model, for each of its calls that trains."""
    noted: list[int] = []

    def note(args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            noted.append(data.fingerprint([args, kwargs]))

    with _on_training_calls(model, note):
        yield noted


@contextmanager
def inputs_kept(model: torch.nn.Module, kept: list[tuple[Any, Any]]) -> Iterator[None]:
    """Add to ``kept`` the arguments of the first call that trains, if there is one."""
    found: list[tuple[Any, Any]] = []

    def note(args: Any, kwargs: Any) -> None:
        if not found:
            found.append(with_tensors((args, kwargs), torch.Tensor.detach))

    with _on_training_calls(model, note):
        yield
    kept += found


def _on_training_calls(model: torch.nn.Module, note: Callable[[Any, Any], None]) -> AbstractContextManager[None]:
    def call(inner: Call, args: Any, kwargs: Any) -> Any:
        if is_training_call():
            note(args, kwargs)
        return inner(*args, **kwargs)

    return replaced_call(model, call)


def output_of(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What the model gives, detached, in the first call that trains, at which the run ends. Where none does, that of
    the first call without gradients: some steps run the model once for the loss and once more, in parts, for the
    gradients. Where parts of the model are called alone, or what it gives has no tensor, what ``run`` gives: a loss."""
    trained: list[Any] = []
    others: list[Any] = []

    @contextmanager
    def catch(result: list[Any]) -> Iterator[None]:
        training = is_training_call()
        yield
        (trained if training else others).extend(result)
        if training:
            raise Enough

    with suppress(Enough), called(model, catch):
        others.append(run())
    found = tensor_of((trained or others)[0])
    return (run() if found is None else found).detach()


class Enough(BaseException):
    """Ends a run once its first output is there. A user's ``except Exception`` does not catch a BaseException."""
