"""The output of a model, whatever it is made of: the tensor that two arms compare, and what entered the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from pytest_fp8.worker.training.phases import Call, called, is_training_call, replaced_call
from pytest_fp8.zoo import data
from pytest_fp8.zoo.batch import tensors_in


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

    def note(inner: Call, args: Any, kwargs: Any) -> Any:
        if is_training_call():
            with torch.no_grad():
                noted.append(data.fingerprint([args, kwargs]))
        return inner(*args, **kwargs)

    with replaced_call(model, note):
        yield noted


def first_call(model: torch.nn.Module, run: Callable[[], Any], other: list[Any] | None = None) -> list[Any]:
    """[what the model gave in the first call that trains], at which the run ends; empty where none did. ``other``:
    takes what it gave in the first call of another kind."""
    outputs: list[Any] = []

    @contextmanager
    def catch(result: list[Any]) -> Iterator[None]:
        training = is_training_call()
        yield
        if training:
            outputs.extend(result)
            raise Enough
        if other is not None and not other:
            other.extend(result)

    with suppress(Enough), called(model, catch):
        run()
    return outputs


def first_inputs(model: torch.nn.Module, run: Callable[[], Any]) -> tuple[Any, Any] | None:
    """Arguments of the first call that trains, at which the run ends; ``None`` where none did."""
    inputs: list[tuple[Any, Any]] = []

    def take(inner: Call, args: Any, kwargs: Any) -> Any:
        if not is_training_call():
            return inner(*args, **kwargs)
        inputs.append((args, kwargs))
        raise Enough

    with suppress(Enough), replaced_call(model, take):
        run()
    return inputs[0] if inputs else None


def output_of(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What the model gives when the loss calls it, detached; the loss itself where it calls parts of the model alone,
    or where what the model gives has no tensor."""
    given = first_call(model, loss_of)
    found = tensor_of(given[0]) if given else None
    return found.detach() if found is not None else loss_of().detach()


class Enough(BaseException):
    """Ends a run once its first output is there. A user's ``except Exception`` does not catch a BaseException."""
