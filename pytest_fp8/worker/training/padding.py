"""Pads a batch, or the rows of a tensor, to a multiple of 16, so that FP8 kernels take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fp8.zoo.batch import tensors_of, with_named_tensors

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label that cross entropy ignores, in torch and in transformers."""
FILL = {"labels": IGNORED, "attention_mask": 0}
"""Value of padded places, by the entry's name."""


def pad_to_multiple(batch: Any, multiple: int = 16, *, pad_id: int = 0, ignore_index: int = IGNORED) -> Any:
    """A copy of the batch, padded at its end until its number of rows is a multiple of ``multiple``.

    A dict, a tokenizer's BatchEncoding, or an object with such entries holds tensors of shape [batch, seq] or
    [batch, seq, ...]: the sequence is padded
    on the right until batch x seq is a multiple. ``labels`` are padded with ``ignore_index``, ``attention_mask`` with
    0, ``input_ids`` with ``pad_id`` and all else with 0; entries without a sequence of that length stay as they are.
    The loss does not change: padded places have no label, and in a causal model no real place attends to them. A
    bidirectional model needs an ``attention_mask`` in the batch.

    A tensor of shape [rows, ...] gets rows of zeros, and has at least ``multiple`` rows in the end: some kernels refuse
    the empty input of an expert that no token was sent to. Zero rows give zero gradients::

        rows = pad_to_multiple(x[chosen])
        y = expert(rows)[: chosen.numel()]

    Raises ``ValueError`` for a batch without a sequence.
    """
    import torch

    if isinstance(batch, torch.Tensor):
        missing = max(multiple, _up(batch.shape[0], multiple)) - batch.shape[0]
        return torch.cat([batch, batch.new_zeros(missing, *batch.shape[1:])]) if missing else batch
    entries = {name.rpartition(".")[2]: tensor for name, tensor in tensors_of(batch)}
    leader = next((entries[name] for name in ("input_ids", "inputs_embeds", "labels") if name in entries), None)
    if leader is None or leader.dim() < 2:
        raise ValueError(
            "pad_to_multiple looks for the sequence in input_ids, inputs_embeds or labels of shape [batch, seq, ...]; "
            f"this {type(batch).__name__} has "
            + (", ".join(f"{name} {tuple(t.shape)}" for name, t in entries.items()) or "no tensor")
        )
    rows, seq = leader.shape[:2]
    wanted = next(length for length in range(seq, seq + multiple + 1) if rows * length % multiple == 0)
    fill = {**FILL, "labels": ignore_index, "input_ids": pad_id}

    def padded(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.dim() < 2 or value.shape[:2] != (rows, seq) or wanted == seq:
            return value
        more = value.new_full((rows, wanted - seq, *value.shape[2:]), fill.get(name, 0))
        return torch.cat([value, more], dim=1)

    return with_named_tensors(batch, padded)


def _up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple
