"""One training step as a user writes it. Every arm runs this function; only the model differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LossFunction = Callable[["torch.nn.Module", Any], "torch.Tensor"]
Phase = Callable[[str], AbstractContextManager[Any]]
"""Opens a context around a part of the step: ``forward``, ``backward`` or ``optimizer``."""


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss in nats; logits [batch, seq, vocab] in any float type, labels [batch, seq] int64."""
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def loss_of_logits(compiled: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """:func:`cross_entropy`. Compiled, the float32 copy of the logits is never written to memory."""
    import torch

    return torch.compile(cross_entropy) if compiled else cross_entropy


def language_model_loss(compiled: bool) -> LossFunction:
    """The loss of the suite's models on batches of :mod:`pytest_fp8.zoo.data`, in nats."""
    next_token_loss = loss_of_logits(compiled)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return next_token_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])

    return loss


def default_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a user's own model: what ``model(**batch)`` or ``model(batch)`` gives, or its ``.loss``."""
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    return getattr(output, "loss", output)  # type: ignore[no-any-return]


def adamw(parameters: Iterable[torch.nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW with the usual settings for decoders; the fused kernel on a GPU."""
    import torch

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    on_gpu = bool(trained) and trained[0].is_cuda
    return torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)


def training_step(
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    precision: Callable[[], AbstractContextManager[Any]],
    *,
    loss_of: LossFunction,
    backward: Callable[[torch.Tensor], None] | None = None,
    phase: Phase = nullcontext,
    on_gradients: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Forward, backward, optimizer step. Gives the loss, detached, still on its device.

    ``precision`` opens the backend's context around the forward pass (Transformer Engine's autocast). ``backward`` is
    called with the loss in place of ``loss.backward()`` (Accelerate). ``on_gradients`` runs before the optimizer steps.
    """
    with phase("forward"), precision():
        loss = loss_of(model, batch)
    with phase("backward"):
        loss.backward() if backward is None else backward(loss)
    if on_gradients is not None:
        on_gradients()
    with phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    # Of shape (1,) in some models: what is noted of each step is one number.
    return loss.detach().reshape(())
