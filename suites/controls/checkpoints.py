"""Controls of saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controls.control import BOTH, Control, control, micro, torch
from controls.models import TIED, squares
from controls.ways import WAYS, Forwards, fault, renew_weights
from pytest_fp8.codes import K
from pytest_fp8.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor


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


def _loads_nothing(arm: Any, made: Any) -> None:
    made.load_state_dict = lambda state_dict: None


def _renews_the_head(arm: Any, model: Any) -> None:
    """The output projection, which was the embedding, gets a copy of it in the conversion."""
    renew_weights([model.lm_head])


_tied = {**TIED, "case": micro(model="own", resume=False)}
fault("stored-in-fp8", K.STORED_IN_FP8, "weights stored in FP8", converted=_saves_e4m3)
fault("prefixed-keys", K.WEIGHTS_MISSING, "prefixed keys loaded into nothing", converted=_loads_prefixed, breaks=BOTH)
fault("optimizer-lost", K.OPTIMIZER_LOST, "weights loaded, optimizer not", optimizer_made=_loads_nothing)
fault("tie-broken", K.UNTIED, "a tied head becomes a weight of its own", converted=_renews_the_head, **_tied)


@control("copy-not-renewed", K.STALE_COPIES, "a cached FP8 weight that a load does not renew")
class CopyNotRenewed(Forwards):
    """Made in the first evaluation and dropped when the optimizer has stepped: evaluate, load, evaluate computes with
    the old weights."""

    def converted(self, model: Any) -> None:
        self._copies: dict[int, Any] = {}
        super().converted(model)

    def forward(self, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
        if torch.is_grad_enabled():
            return own(x)
        live = layer.weight
        layer.weight = self._copies.setdefault(id(layer), torch.nn.Parameter(live.detach().clone()))
        try:
            return own(x)
        finally:
            layer.weight = live

    def stepped(self) -> None:
        self._copies.clear()


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
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"schedule": optimizer.scheduler.state_dict(), "average": optimizer.average}
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


class OwnFunctions(Control):
    """A workload whose own ``save()`` and ``load()`` lose something, in both arms."""

    case, workload, breaks = micro(model="own", name="saved"), SAVED, BOTH
    loaded = False

    def build(self) -> None:
        self.setup.own = replace(SAVED, save=self.save, load=self.load)
        super().build()

    def save(self, model: Any, optimizer: Any, folder: Any) -> None:
        save(model, optimizer, folder)
        state = torch.load(folder / STATE, weights_only=True)
        self.lose(model, state)
        torch.save(state, folder / STATE)

    def lose(self, model: Any, state: dict[str, Any]) -> None:
        """Take something out of what was saved: ``model``, ``optimizer``, ``schedule``, ``average``."""

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


def _leaves_eval(arm: Any, model: Any, state: dict[str, Any]) -> None:
    model.eval()


def _other_order(arm: Any, seed: int, step: int, whole: bool = False) -> Any:
    return arm.setup.training_batch(seed, step + 100 * (arm.loaded and step < 100), whole)


# It then starts at step 0.
fault("schedule-restarts", K.STATE_LOST, "own save() without the schedule", lose=_without("schedule"))
# The optimizer keeps it as an attribute, which its state_dict() does not hold.
fault("average-lost", K.STATE_LOST, "an average of the weights is not saved", lose=_without("average"))
fault("buffers-lost", K.WEIGHTS_MISSING, "own save() without buffers", lose=_no_buffers)
fault("cast-to-half", K.WEIGHTS_CHANGED, "own save() in float16", lose=_cast_to_half)
_alone: dict[str, Any] = {"breaks": ("fp8",)}
fault("save-leaves-eval", K.STATE_LEFT_BEHIND, "own save() leaves the model in eval mode", lose=_leaves_eval, **_alone)
_resumed = {"training_batch": _other_order, "verdicts": ("INVALID",), **_alone}
fault("other-order", K.DATA_NOT_CARRIED, "a resumed run draws another order of data", OwnFunctions, **_resumed)
