"""One arm's model: built, converted, compiled and trained. Runs in the arm's own process, never in pytest's.

The order of construction is the one that works: convert, checkpoint activations, compile, parallelize, warm up.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends import backend, import_library
from pytest_fp8.backends.accelerate import accelerate_precision
from pytest_fp8.backends.base import Backend, Conversion, Prepared
from pytest_fp8.backends.linears import linears, mark_skipped, observed_conversion, other_names
from pytest_fp8.backends.trainer import by_trainer
from pytest_fp8.backends.ways import inner_model, way
from pytest_fp8.case import Case
from pytest_fp8.recipes import recipe_facts
from pytest_fp8.shipping import unship_in_arm
from pytest_fp8.worker.as_built import OwnFp8, definition_of, dropped_behaviour, first_step, own_fp8, with_behaviour
from pytest_fp8.worker.notes import weights_of
from pytest_fp8.worker.state.snapshot import Snapshot, unchanged
from pytest_fp8.worker.state.weights import copy_values
from pytest_fp8.worker.tensors import plain_name
from pytest_fp8.worker.training import ranks
from pytest_fp8.worker.training.preparation import (
    checkpoint_activations,
    compile_blocks,
    multiply_bfloat16_through_float32,
    prefer_fast_attention,
    require_device,
    under_autocast,
)
from pytest_fp8.worker.training.setup import TrainingSetup, converted
from pytest_fp8.worker.training.step import (
    Followed,
    Step,
    on_training_calls,
    require_whole,
    run_step,
    settings_now,
    step_schedule,
)
from pytest_fp8.workload import Workload
from pytest_fp8.zoo import training
from pytest_fp8.zoo.batch import with_tensors

WARM_UP = 3
"""Steps before an arm answers. Two may compile: the second where the first one's guards do not hold."""


class Engine:
    """One trainable variant of a case, live on its device. A control breaks it by overriding its methods."""

    def __init__(
        self, spec: ArmSpec, explain_failure: Callable[[Engine, Exception | None], None] | None = None
    ) -> None:
        """``explain_failure`` is called when the first steps fail, and may raise a better error than theirs; with
        emulated FP8 before them, since a CPU multiplies sizes that no FP8 kernel takes."""
        self.spec, self.case = spec, spec.case
        require_device(torch.device(spec.device))
        self.device = ranks.join(self.case, torch.device(spec.device))
        self.way = way(self.case.parallel)
        self.way.join(self.device)
        self.backend = backend(self.case.backend)
        # Before any other: one that brings models patches others, which it must find unchanged.
        import_library(self.case.backend)
        if spec.threads:
            torch.set_num_threads(spec.threads)
        multiply_bfloat16_through_float32(self.device)
        torch.zeros(1, device=self.device)
        own: Workload | None = unship_in_arm(spec.workload) if spec.workload else None
        if own is not None and own.trainer is not None:
            own = by_trainer(own, self.backend, self.case, self.device)
        self.setup = TrainingSetup(self.case, own, self.backend, self.device)
        _require_recipe(self.backend, self.case)
        self.calibration_passes = recipe_facts(self.case.backend, self.case.recipe).calibration_passes
        self.attention = prefer_fast_attention(self.device)
        self.own_fp8 = OwnFp8()
        self.build()
        self.first_step = first_step(self)
        self.timing_batches = [self.timing_batch(step) for step in range(4)]
        self.warm_up(explain_failure)
        self.modes = {module: module.training for module in self.model.modules()}
        """Those in which its first steps leave its modules: a step that ends in ``eval()`` begins there, too."""
        self.own_fp8 = own_fp8(self)
        # Freeze the heap, so that collections before a turn skip it; the GPU would idle meanwhile.
        gc.collect()
        gc.freeze()

    # -- construction: build, convert, activation checkpointing, compile, parallelize, warm up ------------------------

    def build(self) -> None:
        """Everything up to the first training step."""
        own = self.setup.own
        self.switches = {"asked": os.environ.get("ACCELERATE_MIXED_PRECISION", "")}
        self.model = self.fresh_model(seed=0)
        self.setup.keep(0, self.model)
        self.definition = definition_of(self.model)
        buffers = {name for name, _ in self.model.named_buffers()}
        self.originals = {name: (m.in_features, m.out_features) for name, m in linears(self.model).items()}
        leave = (*(own.leave if own is not None else ()), *self.spec.leave)
        self.unmatched = mark_skipped(self.model, leave)
        """Patterns of what is to be left that match no Linear."""
        self.compiled = self.case.compile
        self.conversion = self._observed_conversion()
        self.switches["accelerate"] = accelerate_precision()
        self.precision = self.precision_context()
        if self.case.activation_checkpointing:
            self.checkpoint_activations()
        if self.compiled and not self.backend.brings_model:
            compile_blocks(self.model)
        prepared = self.parallelize()
        self.wrapped = self.model if prepared.wrapped is None else prepared.wrapped
        """What a training step calls: the model, or what wraps it (``DistributedDataParallel``)."""
        self.model = inner_model(self.wrapped, self.model)
        self.loss_of = prepared.loss_of or self.setup.loss()
        self.backward = prepared.backward
        self._library_optimizer = prepared.optimizer
        self.optimizer = self.make_optimizer()
        # A workload makes a new optimizer for each curve; nothing may keep the old one.
        makes_anew = own is not None and self._library_optimizer is None
        self._put_settings_back = None if makes_anew else settings_now(self.optimizer)
        # After the conversion, so that what convert() set is the arm's own; a fresh model has no buffers of these.
        made_by_convert = [name for name, _ in self.model.named_buffers() if plain_name(name) not in buffers]
        self.besides_weights = Snapshot(self.model, made_by_convert)

    def _observed_conversion(self) -> Conversion:
        """Convert the model. What that did besides, to weights and to layers, is told from before and after."""
        before, behaviour = weights_of(self.model), with_behaviour(self.model)
        aliases = other_names(self.model)
        conversion = self.convert()
        self._tell_apart(aliases, conversion)
        self.weights = before, weights_of(self.model)
        conversion.dropped_behaviour = dropped_behaviour(behaviour, self.model, conversion.converted)
        return conversion

    def _tell_apart(self, aliases: Mapping[str, str], conversion: Conversion) -> None:
        """Account for a Linear's other name by itself where the conversion replaced the one and not the other."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for alias, first in aliases.items():
            if alias in modules and modules[alias] is not modules.get(first):
                self.originals[alias] = self.originals[first]
                if self.backend.is_fp8_layer(modules[alias]):
                    conversion.converted.append(alias)

    def convert(self) -> Conversion:
        """Convert the model in place, or put another one in its place; gives what that was meant to do."""
        own = self._own_fp8()
        if own is not None and own.convert is not None:
            self.model = converted(own.convert, self.model)
            conversion = observed_conversion(self.model, self.originals, self.backend.is_fp8_layer, own.leave)
            self._prepared = Prepared(self.model, conversion)
            return conversion
        self._prepared = self.backend.prepare(self.model, self.setup.optimizer, self.case)
        self.model = self._prepared.model
        self.switches["asked"] = self._prepared.asked or self.switches["asked"]
        conversion = self._prepared.conversion
        if conversion.layers is not None:
            self.originals = dict(conversion.layers)
        return conversion

    def precision_context(self) -> Callable[[], Any]:
        """What makes the context around each forward pass."""
        own = self._own_fp8()
        inner = own.precision if own is not None and own.precision is not None else self.backend.precision(self.case)
        return partial(under_autocast, self.device, inner) if self.case.autocast else inner

    def checkpoint_activations(self) -> None:
        """Have the backward pass recompute activations."""
        checkpoint_activations(self.model, self.backend.recompute_function(), {})

    def parallelize(self) -> Prepared:
        """The model on the ranks of this arm."""
        prepared = replace(self._prepared, model=self.model)
        if self.backend.through_accelerate:
            return prepared  # Accelerate has parallelized it
        from torch.distributed.device_mesh import init_device_mesh

        mesh = partial(init_device_mesh, self.device.type, (self.case.gpus,))
        return self.way.parallelize(prepared, mesh, self.setup)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The library's own, where it makes one with its wrapper; else a new one of the setup."""
        return self._library_optimizer or self.setup.optimizer(self.model)

    @property
    def converts_itself(self) -> bool:
        """Whether the workload's own conversion puts layers in FP8."""
        own = self._own_fp8()
        return own is not None and own.convert is not None

    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        """Whether a module is an FP8 layer: by its class, or by its products."""
        return module in self.own_fp8.modules or self.backend.is_fp8_layer(module)

    def _own_fp8(self) -> Workload | None:
        """The workload in the FP8 arm, whose own conversion and precision count there; ``None`` in the reference."""
        return self.setup.own if recipe_facts(self.case.backend, self.case.recipe).roles else None

    def warm_up(self, explain_failure: Callable[[Engine, Exception | None], None] | None) -> None:
        """Run three training steps; the first of them compile."""
        if self.case.emulated and explain_failure is not None:
            explain_failure(self, None)
        self.inputs: list[tuple[Any, Any]] = []
        """Arguments of the model in the first call that trains in each of these steps. None where a step calls parts of
        the model alone."""
        try:
            for batch in self.timing_batches[:WARM_UP]:
                first = len(self.inputs)

                def keep(*call: Any, first: int = first) -> None:
                    if len(self.inputs) == first:
                        self.inputs.append(with_tensors(call, torch.Tensor.detach))

                with on_training_calls(self.wrapped, keep):
                    if self.own_step is None:
                        self.step(batch)
                    else:
                        require_whole(self.own_step, *self._followed(batch))
        except Exception as error:
            # Of several ranks this one may be alone in its error, and the others in a collective that it would join.
            if explain_failure is not None and self.case.gpus == 1:
                explain_failure(self, error)
            raise

    # -- model and data -----------------------------------------------------------------------------------------------

    def fresh_model(self, seed: int) -> torch.nn.Module:
        """The unconverted model with the weights of ``seed``: bfloat16, on this arm's device."""
        return self.setup.fresh_model(seed)

    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        """The batch of one step of a loss curve, the same in every arm: this rank's part of it, or the ``whole``."""
        return self.setup.training_batch(seed, step, whole)

    def timing_batch(self, step: int) -> Any:
        """The batch of one timed step."""
        return self.setup.timing_batch(step)

    def restart(self, seed: int, jitter: bool = False) -> None:
        """Go back to step 0 with the weights of ``seed``. Optimizer and scaling state are reset; compiled code stays.

        ``jitter`` moves each weight by at most about one unit in its last BF16 place. A person would call it the same
        training, but it rounds differently: it shows how far two correct BF16 runs drift apart.
        """
        self.settle()
        brought = self.backend.seeded_values(self.model, seed)
        values, buffers = self.setup.seeded_values(seed) if brought is None else (brought, {})
        missing = copy_values(self.model, values, seed if jitter else None, buffers)
        if brought is None:
            if missing:
                raise RuntimeError(f"converted parameters that the fresh model does not have: {missing[:3]}")
            self.besides_weights.restore()
        self.optimizer.state.clear()
        self.renew_scales()  # by the old one: what stands beside a new one begins its curve without these passes
        if self._put_settings_back is None:
            # The learning rates too: a schedule hangs on the optimizer that it was made for, and has moved them.
            self.optimizer = self.make_optimizer()
        else:
            self._put_settings_back()

    def renew_scales(self) -> None:
        """Bring scaling state to that of a fresh, calibrated model: after a restart, and after weights were loaded."""
        self.backend.reset_scaling(self.model)
        self.calibrate(self.calibration_passes, lambda index: self.training_batch(seed=0, step=2_000_000 + index))

    def calibrate(self, passes: int, draw: Callable[[int], Any]) -> None:
        """Run so many passes over the batches that ``draw`` gives. They change scaling state and nothing else."""
        is_fp8 = self.is_fp8_layer
        scaled = {part for layer in self.model.modules() if is_fp8(layer) for part in layer.modules()}
        for index in range(passes):
            with unchanged(self, besides=scaled):
                self.step(draw(index))

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def own_step(self) -> Step | None:
        """The user's own training step, where the workload has one."""
        return self.setup.own.step if self.setup.own is not None else None

    def step(
        self,
        batch: Any,
        phase: training.Phase = nullcontext,
        on_gradients: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """One training step; gives the loss, detached. ``phase`` is opened around its parts, ``on_gradients`` is called
        before the optimizer steps."""
        # A user's loss may itself go back through the model, as adversarial training does, so that its step is followed
        # as a hand-written one. But a library's backward pass goes on after autograd's: DeepSpeed reduces its last
        # gradients there.
        watched = phase is not nullcontext and self.setup.own is not None and self.backward is None
        if self.own_step is not None or watched:
            loss = self._followed(batch, phase, on_gradients)[0]
        else:
            loss = self._training_step(
                self.wrapped, batch, self.optimizer, self.precision, phase=phase, on_gradients=on_gradients
            )
        if self.own_step is None:
            step_schedule(self.optimizer, loss)
        self.backend.stepped(self.model)
        return loss

    @property
    def _training_step(self) -> Callable[..., torch.Tensor]:
        return partial(training.training_step, loss_of=self.loss_of, backward=self.backward)

    def _followed(
        self, batch: Any, phase: training.Phase = nullcontext, on_gradients: Callable[[], None] | None = None
    ) -> tuple[torch.Tensor, Followed]:
        step = self.own_step or self._training_step
        return run_step(step, self.wrapped, batch, self.optimizer, self.precision, phase, on_gradients)

    def park(self) -> None:
        """Give cached memory back to the device, so that the pair's other arm can use it."""
        # On the model, not the optimizer, which may not hold every parameter that gets a gradient.
        self.model.zero_grad(set_to_none=True)
        self.settle()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """After a forward pass without a backward one: give up what ranks and library hold for that."""
        self.way.settle(self.model)
        self.backend.settle(self.model)

    @property
    def called(self) -> torch.nn.Module:
        """What a user's loss is called with where nothing trains. A library's wrapper has the same ``forward`` as the
        model, and DeepSpeed's engine counts its calls."""
        return self.wrapped if self.way.is_users else self.model

    def synchronize(self) -> None:
        """Wait for the GPU; nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def engine_type(control: str | None) -> type[Engine]:
    """The engine of an arm. ``control`` is ``module:Class`` of what overrides its methods to break it, or ``None``.

    The class need not be a subclass of :class:`Engine`: pytest's process imports it, too, without torch. Raises
    ``ImportError`` or ``AttributeError`` where this process cannot import it.
    """
    if control is None:
        return Engine
    module, _, name = control.partition(":")
    return type(name, (getattr(import_module(module), name), Engine), {})


def _require_recipe(chosen: Backend, case: Case) -> None:
    usable, reason = chosen.usable(case.recipe, case.emulated)
    if not usable:
        raise RuntimeError(f"recipe {case.recipe!r} cannot run here: {reason}")
