"""What an arm answers, operation by operation: the torch side of every question. Gives plain data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends.base import ALIGNMENT, stacked_weights
from pytest_fp8.baselines.provenance import library_versions
from pytest_fp8.questions.products import LayerCall, Product, products_to_json
from pytest_fp8.worker import checkpoint_stores, observe, profile
from pytest_fp8.worker.engine import Engine
from pytest_fp8.worker.preparation import forget_accelerate
from pytest_fp8.worker.step import first_output, muted
from pytest_fp8.workload import ship, unship


class TokenCountError(ValueError):
    """The batch's token count breaks the FP8 products."""

    fp8_cause = "the weight gradient's inner size is the number of tokens, and FP8 kernels take multiples of 16"
    fp8_next = (
        "pad the batch with pytest_fp8.pad_to_multiple(batch), or choose batch x sequence length as a multiple of 16; "
        "for rows that a router chose: pytest_fp8.pad_to_multiple(rows) before the layer, [: len(rows)] behind it"
    )


class ArmServer:
    """An engine with the operations that the protocol knows: every public method but ``answer``."""

    def __init__(self, spec: ArmSpec) -> None:
        forget_accelerate()  # this process may have been another arm, whose precision is none of this one's
        self.engine = Engine(spec, explain_failure=self._check_token_count)
        self.engine.park()

    def answer(self, operation: str, arguments: dict[str, Any]) -> Any:
        operations: dict[str, Callable[..., Any]] = {
            "layers": self.layers,
            "curve": self.engine.curve,
            "blocks": self.engine.blocks,
            "memory": self.engine.memory,
            "park": self.engine.park,
            "save": self.save,
            "load": self.load,
            "logits": self.logits,
            "resume": self.resume,
            "call": self.call,
            "restart": self.engine.restart,
        }
        if operation not in operations:
            raise ValueError(f"unknown operation {operation!r}")
        result = operations[operation](**arguments)
        self.engine.backend.abandon()
        # What is only cached goes back after every question: the pair's other arm may need it. Not between blocks,
        # where the pair knows whether it must.
        if operation != "blocks":
            self.engine.park()
        return result

    def describe(self) -> dict[str, Any]:
        """Versions, sizes and how long each stage took."""
        engine = self.engine
        facts: dict[str, Any] = {
            "libraries": library_versions(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if engine.device.type == "cuda" else None,
            "parameters": sum(p.numel() for p in engine.model.parameters()),
            "compiled": engine.compiled,
            "seconds": engine.seconds,
        }
        if engine.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            facts["memory"] = {
                "allocated": torch.cuda.memory_allocated(),
                "peak": torch.cuda.max_memory_reserved(),
                "free": free,
                "total": total,
            }
        return facts

    # -- presence -------------------------------------------------------------------------------------------------

    def layers(self) -> dict[str, Any]:
        """Conversion, recipe in force and the products that one training step executed."""
        engine = self.engine
        batch = engine.timing_batch(0)

        modules = dict(engine.model.named_modules())
        calls, recipes, agreement = self._observed(batch)
        # Drawn again, the batch leaves torch's generators where the observed pass found them.
        batch = engine.timing_batch(0)
        engine.park()
        history = self._amax_histories()
        bypassed: set[str] = set()

        def note_bypassed() -> None:
            called = {call.name for call in calls}
            uncalled = [name for name in engine.conversion.converted if name not in called]
            bypassed.update(n for n in uncalled if any(p.grad is not None for p in modules[n].parameters()))

        if engine.device.type == "cuda":
            seen = profile.profile_step(lambda phase: engine.step(batch, phase, note_bypassed))
            products: list[Product] = seen["products"]
            families = profile.learn_families(products)
            attention, milliseconds = seen["attention"], seen["milliseconds"]
        else:
            recorder = observe.ProductRecorder()
            with recorder.watching(modules[name] for name in engine.originals):
                engine.step(batch, recorder.in_phase, note_bypassed)
            products, families, attention, milliseconds = recorder.products, None, {}, {}
        live = [name for name in engine.originals if engine.backend.is_fp8_layer(modules[name])]
        return {
            "originals": {name: list(sizes) for name, sizes in engine.originals.items()},
            "converted": engine.conversion.converted,
            "skipped": engine.conversion.skipped,
            "live_fp8": live,
            "kinds": {name: _kind(modules[name]) for name in engine.originals},
            "in_eval": sorted({call.name for call in calls if call.fp8 and not call.training}),
            "agreement": agreement,
            "bypassed": sorted(bypassed),
            "unfrozen": engine.conversion.unfrozen,
            "lost": engine.conversion.lost,
            "stacked": stacked_weights(engine.model),
            "frozen_history": self._unchanged(history),
            "switches": {**engine.switches, **engine.backend.switches},
            "calls": [asdict(call) for call in calls],
            "recipes": recipes,
            "products": products_to_json(products),
            "families": families,
            "attention": attention,
            "milliseconds": milliseconds,
        }

    def _observed(self, batch: Any) -> tuple[list[LayerCall], dict[str, Any], dict[str, tuple[float, float]]]:
        """One eager forward pass, or one eager step of a hand-written loop, with a hook on each Linear."""
        engine = self.engine
        asked = (engine.model, engine.originals, engine.backend.is_fp8_layer, engine.backend.recipe_in_force)
        if engine.own_step is None:

            def forward() -> None:
                with engine.precision():
                    engine.loss_of(engine.model, batch)

            watching = engine.backend.watching if engine.backend.compiles_itself else None
            seen = observe.observe_forward(*asked, forward, watching=watching)
            engine.backend.abandon()
            return seen
        part = observe.Part()
        # The weights stay as they are for the measured step, in which a router must send the rows the same way.
        with muted(engine.optimizer):
            return observe.observe_forward(*asked, lambda: engine.step(batch, phase=part.inside), part)

    def _amax_histories(self) -> dict[str, list[float]]:
        """The amax history of each layer that keeps one."""
        read = {name: self.engine.backend.amax_history(m) for name, m in self.engine.model.named_modules()}
        return {name: history for name, history in read.items() if history is not None}

    def _unchanged(self, before: dict[str, list[float]]) -> list[str]:
        now = self._amax_histories() if before else {}
        return [name for name, history in before.items() if now.get(name) == history]

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
        return checkpoint_stores.save(self.engine, folder, store, optimizer)

    def load(self, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
        return checkpoint_stores.load(self.engine, folder, store, optimizer)

    def logits(self, seed: int) -> bytes:
        """The model's output on the first rows of one held-out batch: float32, at most 64 x 4096 values."""
        engine = self.engine
        batch = engine.training_batch(seed, step=1_000_000)
        # Eagerly: compiling a forward pass without gradients for one batch would take longer than all else here.
        with torch.compiler.set_stance("force_eager"), torch.no_grad(), engine.precision():
            if engine.own_step is not None:
                with torch.enable_grad():
                    output = first_output(engine.own_step, engine.model, batch, engine.optimizer, engine.precision)
            elif isinstance(batch, dict) and "input_ids" in batch:
                output = engine.model(input_ids=batch["input_ids"]).logits
            else:
                output = engine.loss_of(engine.model, batch)
        rows = output.float().reshape(-1, output.shape[-1] if output.dim() else 1)
        return bytes(rows[:64, :4096].contiguous().cpu().numpy().tobytes())

    def resume(self, seed: int, first_step: int, steps: int) -> dict[str, Any]:
        """Go on training from where the arm is; the curve of steps ``first_step`` and on."""
        return self.engine.curve(seed, steps, first_step=first_step)

    # -- the user's own function ----------------------------------------------------------------------------------

    def call(self, function: str) -> str:
        """Run a shipped function on the live model; its result travels back the same way."""
        return ship(unship(function)(self.engine.model), "the function's result")

    def _check_token_count(self, engine: Engine) -> None:
        """Raise :class:`TokenCountError` where a converted layer is given rows that no FP8 kernel takes.

        Where FP8 is emulated, layers go on being watched in training: a CPU multiplies sizes that no FP8 kernel takes,
        and a router sends other rows in each step.
        """
        multiple = engine.backend.token_multiple
        if multiple == 1 or not engine.conversion.converted:
            return
        modules = dict(engine.model.named_modules())
        names = {id(modules[name]): name for name in engine.conversion.converted}

        def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = observe.input_of(args, kwargs)
            rows = given.numel() // max(1, given.shape[-1])
            if rows % multiple:
                raise TokenCountError(
                    f"layer {names[id(module)]!r} was given {rows} rows of input (shape {tuple(given.shape)}); "
                    f"FP8 needs a multiple of {ALIGNMENT}"
                )

        def look_in_training(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Evaluation has no weight gradient.
            if torch.is_grad_enabled():
                look(module, args, kwargs)

        def watch(hook: Callable[..., None]) -> list[Any]:
            return [modules[name].register_forward_pre_hook(hook, with_kwargs=True) for name in names.values()]

        handles = watch(look if engine.own_step is None else look_in_training)
        try:
            with torch.compiler.set_stance("force_eager"):
                batch = engine.timing_batch(0)
                if engine.own_step is not None:
                    with muted(engine.optimizer):
                        engine.own_step(engine.model, batch, engine.optimizer, engine.precision)
                else:
                    with torch.no_grad(), engine.precision():
                        engine.loss_of(engine.model, batch)
        finally:
            for handle in handles:
                handle.remove()
        if engine.case.emulated:
            watch(look_in_training)


def _kind(module: torch.nn.Module) -> str:
    """Its class; where a class of this package stands in for a library's, the library's, which is what users see."""
    kind = next(k for k in type(module).__mro__ if not k.__module__.startswith("pytest_fp8."))
    return f"{kind.__module__}.{kind.__qualname__}"
