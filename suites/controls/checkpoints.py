"""Controls of saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controls.control import Control, micro
from controls.own_checkpoints import CASE, SAVED, STATE, load, save
from pytest_fp8.codes import K

if TYPE_CHECKING:
    import torch


class StoredInFp8(Control):
    """The converted layers' weights are saved as e4m3."""

    number, id = 19, "stored-in-fp8"
    title = "weights stored in FP8"
    question = "checkpoints"
    code = K.STORED_IN_FP8
    about = "weights were stored in FP8"
    case = micro()

    def converted(self, model: Any) -> None:
        import torch

        def cast(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].to(torch.float8_e4m3fn)

        for layer in self.fp8_layers():
            layer.register_state_dict_post_hook(cast)


class LoadedIntoNothing(Control):
    """The model loads by the keys of its compiled wrapper, which begin with ``_orig_mod.``, and with ``strict=False``:
    none of them matches."""

    number, id = 20, "prefixed-keys"
    nightly = True
    title = "prefixed keys loaded into nothing"
    question = "checkpoints"
    code = K.NOTHING_LOADED
    case = micro()
    breaks = ("fp8", "bf16")

    def converted(self, model: Any) -> None:
        own = model.load_state_dict

        def load(state: Mapping[str, Any], **more: Any) -> Any:
            return own({f"_orig_mod.{name}": value for name, value in state.items()}, strict=False)

        model.load_state_dict = load


class OptimizerNotLoaded(Control):
    """Weights are loaded; the stored optimizer state is not read."""

    number, id = 21, "optimizer-lost"
    title = "weights loaded, optimizer not"
    question = "checkpoints"
    code = K.OPTIMIZER_LOST
    about = "weights were loaded and the optimizer was not"
    case = micro()

    def make_optimizer(self) -> torch.optim.Optimizer:
        made = super().make_optimizer()
        made.load_state_dict = lambda state_dict: None  # type: ignore[method-assign]
        return made


class CopyNotRenewed(Control):
    """Each FP8 layer keeps a copy of its weight, made in the first evaluation and dropped when the optimizer has
    stepped. Loading a checkpoint does not drop it, so that evaluate, load, evaluate computes with the old weights."""

    number, id = 89, "copy-not-renewed"
    nightly = True
    title = "a cached FP8 weight that a load does not renew"
    question = "checkpoints"
    code = K.STALE_COPIES
    case = micro()

    def converted(self, model: Any) -> None:
        import torch

        self._copies: dict[int, Any] = {}

        def keeping(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
            own = layer.forward

            def forward(given: torch.Tensor) -> torch.Tensor:
                if torch.is_grad_enabled():
                    return own(given)  # type: ignore[no-any-return]
                live = layer.weight
                copy = self._copies.setdefault(id(layer), torch.nn.Parameter(live.detach().clone()))
                layer.weight = copy
                try:
                    return own(given)  # type: ignore[no-any-return]
                finally:
                    layer.weight = live

            return forward

        self.with_forward(keeping)

    def stepped(self) -> None:
        self._copies.clear()


class OwnFunctions(Control):
    """A workload whose own ``save()`` or ``load()`` is replaced in both arms by one that loses something."""

    question, case, workload = "checkpoints", CASE, SAVED
    breaks = ("fp8", "bf16")

    def build(self) -> None:
        self.setup.own = replace(SAVED, save=self.save)
        super().build()

    def save(self, model: Any, optimizer: Any, folder: Any) -> None:
        import torch

        save(model, optimizer, folder)
        state = torch.load(folder / STATE, weights_only=True)
        self.lose(model, state)
        torch.save(state, folder / STATE)

    def lose(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        """Take something out of what was saved: ``model``, ``optimizer``, ``schedule``, ``average``."""


class OwnOptimizerLost(OwnFunctions):
    """The user's ``save()`` leaves the optimizer out."""

    number, id = 76, "own-optimizer-lost"
    nightly = True
    title = "own save() without the optimizer"
    code = K.OPTIMIZER_LOST
    about = "weights were loaded and the optimizer was not"

    def lose(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        del state["optimizer"]


class ScheduleRestarts(OwnFunctions):
    """The user's ``save()`` leaves the learning-rate schedule out, which then starts at step 0."""

    number, id = 77, "schedule-restarts"
    title = "own save() without the schedule"
    code = K.SCHEDULE_LOST

    def lose(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        del state["schedule"]


class BuffersLost(OwnFunctions):
    """The user's ``save()`` takes the parameters alone: running statistics are gone."""

    number, id = 78, "buffers-lost"
    title = "own save() without buffers"
    code = K.BUFFERS_NOT_CARRIED

    def lose(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        parameters = {name for name, _ in model.named_parameters()}
        state["model"] = {name: value for name, value in state["model"].items() if name in parameters}


class OwnStoredInFp8(OwnFunctions):
    """The user's ``save()`` stores matrices as e4m3."""

    number, id = 79, "own-stored-in-fp8"
    nightly = True
    title = "own save() of FP8 copies"
    code = K.STORED_IN_FP8
    about = "the FP8 copies were saved in place of the master weights"

    def lose(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        import torch

        held = state["model"]
        state["model"] = {name: w.to(torch.float8_e4m3fn) if w.dim() == 2 else w for name, w in held.items()}


class KeysRenamed(OwnFunctions):
    """One block was renamed between save and load; ``strict=False`` drops its keys."""

    number, id = 80, "keys-renamed"
    nightly = True
    title = "renamed keys, strict=False"
    code = K.WEIGHTS_MISSING

    def lose(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        state["model"] = {name.replace("up.", "expand."): value for name, value in state["model"].items()}


class CastToHalf(OwnFunctions):
    """The user's ``save()`` stores weights as float16, whose smallest numbers are larger than bfloat16's."""

    number, id = 81, "cast-to-half"
    nightly = True
    title = "own save() in float16"
    code = K.CAST_ON_THE_WAY
    about = "float16"

    def lose(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        state["model"] = {
            name: value.half() if value.is_floating_point() else value for name, value in state["model"].items()
        }


class AverageLost(OwnFunctions):
    """The optimizer keeps an average of the weights as an attribute, which its ``state_dict()`` does not hold."""

    number, id = 82, "average-lost"
    nightly = True
    title = "an average of the weights is not saved"
    code = K.ATTRIBUTES_LOST

    def lose(self, model: torch.nn.Module, state: dict[str, Any]) -> None:
        del state["average"]


class OtherOrderOfData(Control):
    """After a checkpoint was loaded, batches come from another place of the data."""

    number, id = 83, "other-order"
    nightly = True
    title = "a resumed run draws another order of data"
    question = "checkpoints"
    code = K.DATA_NOT_CARRIED
    case, workload = CASE, SAVED
    verdicts = ("INVALID",)

    _loaded = False

    def build(self) -> None:
        self.setup.own = replace(SAVED, load=self.load)
        super().build()

    def load(self, model: Any, optimizer: Any, folder: Any) -> None:
        self._loaded = True
        load(model, optimizer, folder)

    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        return super().training_batch(seed, step + 100 if self._loaded and step < 100 else step, whole)
