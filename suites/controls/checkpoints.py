"""Controls of saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from controls.control import BOTH, WAYS, Tensor, control, micro, torch
from controls.models import TIED, squares
from controls.ways import Prepares, renew_weights
from pytest_fp8.codes import K
from pytest_fp8.workload import Workload


def _saves_e4m3(arm: Any, model: Any) -> None:
    def cast(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].to(torch.float8_e4m3fn)

    for layer in arm.fp8_layers():
        layer.register_state_dict_post_hook(cast)


def _loads_prefixed(arm: Any, model: Any) -> None:
    """The keys of the compiled wrapper, and strict=False."""
    own = model.load_state_dict
    model.load_state_dict = lambda state, **more: own(
        {f"_orig_mod.{name}": value for name, value in state.items()}, strict=False
    )


def _evaluated_by_a_copy(weight: Tensor) -> Tensor:
    """Made in the first evaluation and dropped when the optimizer has stepped: evaluate, load, evaluate computes with
    the old weights."""
    return weight if torch.is_grad_enabled() else COPIES.setdefault(weight, weight.detach().clone())


COPIES: dict[Tensor, Tensor] = {}
control("stored-in-fp8", K.STORED_IN_FP8, "weights stored in FP8")(converted=_saves_e4m3)
control("prefixed-keys", K.WEIGHTS_MISSING, "prefixed keys loaded into nothing")(converted=_loads_prefixed, breaks=BOTH)
control("optimizer-lost", K.OPTIMIZER_LOST, "weights loaded, optimizer not")(
    optimizer_made=lambda arm, made: setattr(made, "load_state_dict", lambda state_dict: None)
)
# The output projection, which was the embedding, gets a copy of it in the conversion.
control("tie-broken", K.UNTIED, "a tied head becomes a weight of its own")(
    converted=lambda arm, model: renew_weights([model.lm_head]), **TIED
)
control("copy-not-renewed", K.STALE_COPIES, "a cached FP8 weight that a load does not renew")(
    layers=lambda arm: arm.fp8_layers(), weight=_evaluated_by_a_copy, stepped=lambda arm: COPIES.clear()
)

# -- functions of the user's own --------------------------------------------------------------------------------------

STATE = "state.pt"


def build() -> Any:
    """Two Linears around a BatchNorm. The last starts small, as the ends of residual branches do: with values that
    float16 does not hold."""
    nn = torch.nn
    last = nn.Linear(128, 32)
    nn.init.normal_(last.weight, std=1e-3)
    return nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.GELU(), last)


def batch(step: int) -> Tensor:
    return torch.randn(96, 32)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW that keeps an average of the weights as an attribute, with a warm-up at ``scheduler``."""

    class Averaging(torch.optim.AdamW):
        def __init__(self, weights: list[torch.nn.Parameter]) -> None:
            super().__init__(weights, lr=2e-3)
            self.average = [weight.detach().float().clone() for weight in weights]
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self, 0.1, 1.0, total_iters=6)

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            given = super().step(closure)
            for mean, weight in zip(self.average, self.param_groups[0]["params"], strict=True):
                mean.lerp_(weight.float(), 0.01)
            return given

    return Averaging(list(parameters))


def save(model: Any, optimizer: Any, folder: Any, lose: Callable[[Any, dict[str, Any]], Any] | None = None) -> None:
    """One file with everything in it, but for what ``lose`` takes out."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"schedule": optimizer.scheduler.state_dict(), "average": optimizer.average}
    if lose is not None:
        lose(model, state)
    torch.save(state, folder / STATE)


def load(model: Any, optimizer: Any, folder: Any) -> None:
    """Loads what it finds, as scripts do that also read older checkpoints."""
    state = torch.load(folder / STATE, weights_only=True)
    model.load_state_dict(state["model"], strict=False)
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    if "schedule" in state:
        optimizer.scheduler.load_state_dict(state["schedule"])
    if "average" in state:
        optimizer.average = state["average"]


SAVED = Workload(build=build, batch=batch, loss=squares, optimizer=optimizer, save=save, load=load)


class OwnFunctions(Prepares):
    """A workload whose own ``save()`` loses something, in both arms: ``lose(model, state)`` takes it out of what was
    saved (``model``, ``optimizer``, ``schedule``, ``average``)."""

    case, workload, breaks = micro(model="own", name="saved"), SAVED, BOTH
    loaded = False
    lose: Any = None

    def prepares(self) -> None:
        self.setup.own = replace(SAVED, save=partial(save, lose=self.lose), load=self.load)

    def load(self, model: Any, optimizer: Any, folder: Any) -> None:
        self.loaded = True
        load(model, optimizer, folder)


WAYS["lose"] = OwnFunctions


def _without(name: str) -> Any:
    """A ``lose`` of this part of what was saved."""
    return lambda arm, model, state: state.pop(name)


def _no_buffers(arm: Any, model: Any, state: dict[str, Any]) -> None:
    """Running statistics are gone."""
    state["model"] = {name: state["model"][name] for name, _ in model.named_parameters()}


def _cast_to_half(arm: Any, model: Any, state: dict[str, Any]) -> None:
    """Its smallest numbers are larger than bfloat16's."""
    state["model"] = {name: w.half() if w.is_floating_point() else w for name, w in state["model"].items()}


# It then starts at step 0.
control("schedule-restarts", K.STATE_LOST, "own save() without the schedule")(lose=_without("schedule"))
# The optimizer keeps it as an attribute, which its state_dict() does not hold.
control("average-lost", K.STATE_LOST, "an average of the weights is not saved")(lose=_without("average"))
control("buffers-lost", K.WEIGHTS_MISSING, "own save() without buffers")(lose=_no_buffers)
control("cast-to-half", K.WEIGHTS_CHANGED, "own save() in float16")(lose=_cast_to_half)
control("save-leaves-eval", K.STATE_LEFT_BEHIND, "own save() leaves the model in eval mode")(
    lose=lambda arm, model, state: model.eval(), breaks=("fp8",)
)
control("other-order", K.DATA_NOT_CARRIED, "a resumed run draws another order of data")(
    OwnFunctions,
    draws=lambda arm, seed, step: (seed, step + 100 * (arm.loaded and step < 100)),
    verdicts=("INVALID",),
    breaks=("fp8",),
)
