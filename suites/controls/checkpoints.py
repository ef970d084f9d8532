"""Controls of saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controls.control import ACCELERATE, BOTH, control, micro, torch
from controls.models import TIED
from controls.ways import Forwards, OwnFunctions, fault, renew_weights
from pytest_fp8.codes import K

if TYPE_CHECKING:
    from torch import Tensor


def _saves_e4m3(arm: Any, model: Any) -> None:
    def cast(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].to(torch.float8_e4m3fn)

    for layer in arm.fp8_layers():
        layer.register_state_dict_post_hook(cast)


fault("stored-in-fp8", K.STORED_IN_FP8, "weights stored in FP8", converted=_saves_e4m3)


def _loads_prefixed(arm: Any, model: Any) -> None:
    own = model.load_state_dict
    model.load_state_dict = lambda state, **more: own(
        {f"_orig_mod.{name}": value for name, value in state.items()}, strict=False
    )


# The keys of the compiled wrapper, and strict=False.
fault(
    "prefixed-keys",
    K.WEIGHTS_MISSING,
    "prefixed keys loaded into nothing",
    converted=_loads_prefixed,
    breaks=BOTH,
    nightly=True,
)
fault(
    "optimizer-lost",
    K.OPTIMIZER_LOST,
    "weights loaded, optimizer not",
    optimizer_made=lambda arm, made: setattr(made, "load_state_dict", lambda state_dict: None),
)
# The output projection, which was the embedding, gets a copy of it in the conversion.
fault(
    "tie-broken",
    K.UNTIED,
    "a tied head becomes a weight of its own",
    source=f"[Accelerate, convert_model copies the weight]({ACCELERATE}/utils/transformer_engine.py)",
    converted=lambda arm, model: renew_weights([model.lm_head]),
    **{**TIED, "case": micro(model="own", resume=False)},
)


@control("copy-not-renewed", K.STALE_COPIES, "a cached FP8 weight that a load does not renew", nightly=True)
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


def _weights(change: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Any:
    """A ``lose`` that changes what was saved of the model."""

    def lose(arm: Any, model: Any, state: dict[str, Any]) -> None:
        state["model"] = change(model, state["model"])

    return lose


# It then starts at step 0.
fault(
    "schedule-restarts",
    K.STATE_LOST,
    "own save() without the schedule",
    lose=lambda arm, model, state: state.pop("schedule"),
)
# Running statistics are gone.
fault(
    "buffers-lost",
    K.WEIGHTS_MISSING,
    "own save() without buffers",
    lose=_weights(lambda model, held: {name: held[name] for name, _ in model.named_parameters()}),
)
fault(
    "keys-renamed",
    K.WEIGHTS_MISSING,
    "renamed keys, strict=False",
    lose=_weights(lambda _, held: {name.replace("up.", "expand."): value for name, value in held.items()}),
    nightly=True,
)
# Its smallest numbers are larger than bfloat16's.
fault(
    "cast-to-half",
    K.CAST_ON_THE_WAY,
    "own save() in float16",
    about="float16",
    lose=_weights(lambda _, held: {name: w.half() if w.is_floating_point() else w for name, w in held.items()}),
    nightly=True,
)
# The optimizer keeps it as an attribute, which its state_dict() does not hold.
fault(
    "average-lost",
    K.STATE_LOST,
    "an average of the weights is not saved",
    lose=lambda arm, model, state: state.pop("average"),
    nightly=True,
)
fault(
    "save-leaves-eval",
    K.STATE_LEFT_BEHIND,
    "own save() leaves the model in eval mode",
    lose=lambda arm, model, state: model.eval(),
    breaks=("fp8",),
)


@control(
    "other-order",
    K.DATA_NOT_CARRIED,
    "a resumed run draws another order of data",
    breaks=("fp8",),
    verdicts=("INVALID",),
    nightly=True,
)
class OtherOrderOfData(OwnFunctions):
    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        return super().training_batch(seed, step + 100 if self.loaded and step < 100 else step, whole)
