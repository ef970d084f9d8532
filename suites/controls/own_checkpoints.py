"""The workload of controls of own checkpoints: running statistics, a schedule, an average of the weights; all saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fp8.case import Case
from pytest_fp8.workload import Workload

if TYPE_CHECKING:
    import torch

STATE = "state.pt"
WIDTH = 32


def build() -> torch.nn.Module:
    """Two Linears around a BatchNorm. The last starts small, as the ends of residual branches do: with values that
    float16 does not hold."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
            self.norm = torch.nn.BatchNorm1d(4 * WIDTH)
            self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
            torch.nn.init.normal_(self.down.weight, std=1e-3)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            given: torch.Tensor = self.down(torch.nn.functional.gelu(self.norm(self.up(rows))))
            return given

    return Net()


def batch(step: int) -> torch.Tensor:
    import torch

    return torch.randn(96, WIDTH)


def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = model(rows) - rows.sin()
    return error.float().square().mean()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW that keeps an average of the weights as an attribute, with a warm-up at ``scheduler``."""
    import torch

    class Averaging(torch.optim.AdamW):
        def __init__(self, weights: list[torch.nn.Parameter]) -> None:
            super().__init__(weights, lr=2e-3)
            self.average = [weight.detach().float().clone() for weight in weights]

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            given = super().step(closure)
            for mean, weight in zip(self.average, self.param_groups[0]["params"], strict=True):
                mean.lerp_(weight.float(), 0.01)
            return given

    made = Averaging(list(parameters))
    made.scheduler = torch.optim.lr_scheduler.LinearLR(made, 0.1, 1.0, total_iters=6)  # type: ignore[attr-defined]
    return made


def save(model: Any, optimizer: Any, folder: Any) -> None:
    """One file with everything in it."""
    import torch

    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": optimizer.scheduler.state_dict(),
            "average": optimizer.average,
        },
        folder / STATE,
    )


def load(model: Any, optimizer: Any, folder: Any) -> None:
    """Loads what it finds, as scripts do that also read older checkpoints."""
    import torch

    state = torch.load(folder / STATE, weights_only=True)
    model.load_state_dict(state["model"], strict=False)
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    if "schedule" in state:
        optimizer.scheduler.load_state_dict(state["schedule"])
    if "average" in state:
        optimizer.average = state["average"]


SAVED = Workload(build=build, batch=batch, loss=loss, optimizer=optimizer, save=save, load=load)
CASE = Case("own", "torchao", "tensorwise", emulated=True, name="saved")
