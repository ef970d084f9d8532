"""The weights and buffers that a fresh model has for a seed: what a restart copies into the live one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pytest_fp8.worker.training.host_copies import on_host


@dataclass(frozen=True)
class SeedValues:
    """By their names in the unconverted model. Of tied ones each name has the value."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: torch.nn.Module) -> SeedValues:
        return cls(dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers()))

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(value.numel() * value.element_size() for value in self._different().values())

    def on_host(self, device: str = "cuda") -> SeedValues:
        """Those of the ``device`` as copies in the host's memory. The model keeps its own: builds may share a table."""
        copied = on_host(self._different(), device)
        kept = {key: value.to("cpu") if value.device.type == device else value for key, value in copied.items()}
        parameters, buffers = (
            {name: kept[str(id(value))] for name, value in named.items()} for named in (self.parameters, self.buffers)
        )
        return SeedValues(parameters, buffers)

    def _different(self) -> dict[str, torch.Tensor]:
        """One entry for what several names share."""
        return {str(id(value)): value for value in (*self.parameters.values(), *self.buffers.values())}
