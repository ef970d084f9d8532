"""An arm's inside: one model, built, converted, compiled, trained. Runs in the arm's own process, never in pytest's.

The order is the one that works: build, convert, activation checkpointing, compile. Compiling goes block by block,
in place, so that parameter names stay as they are.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends import backend
from pytest_fp8.backends.base import Conversion, Prepared, linears, mark_skipped, observed_conversion
from pytest_fp8.recipes import recipe_facts
from pytest_fp8.shipping import unship
from pytest_fp8.worker import memory
from pytest_fp8.worker.dropped_behaviour import besides, lost
from pytest_fp8.worker.fault_points import fault_points_of
from pytest_fp8.worker.first_step import first_step
from pytest_fp8.worker.fused_params import Joined, split, trainable, trained
from pytest_fp8.worker.phases import Seen
from pytest_fp8.worker.preparation import (
    accelerate_precision,
    checkpoint_activations,
    compile_blocks,
    multiply_bfloat16_through_float32,
    prefer_fast_attention,
)
from pytest_fp8.worker.step import Step, muted, require_whole, run_step, schedule_of
from pytest_fp8.worker.timing import timed_blocks
from pytest_fp8.worker.training_setup import TrainingSetup
from pytest_fp8.workload import Workload
from pytest_fp8.zoo import data, training


class Engine:
    """One trainable variant of a case, live on its device."""

    def __init__(self, spec: ArmSpec, explain_failure: Callable[[Engine], None] | None = None) -> None:
        """``explain_failure`` is asked when the first steps fail, and may raise a better error than theirs.

        Where FP8 is emulated it is asked beforehand: a CPU multiplies sizes that no FP8 kernel takes.
        """
        self.spec, self.case = spec, spec.case
        self.device = torch.device(spec.device)
        self.backend = backend(self.case.backend)
        self._require_device()
        multiply_bfloat16_through_float32(self.device)
        self.first_step = first_step(spec)
        own: Workload | None = unship(spec.workload) if spec.workload else None
        self.setup = TrainingSetup(self.case, own, self.backend, self.device)
        self._require_recipe()
        self.attention = prefer_fast_attention(self.device)
        self.fault_points = fault_points_of(spec.control)
        self.fault_points.start(self)
        self.switches = {"asked": os.environ.get("ACCELERATE_MIXED_PRECISION", "")}
        self.seconds: dict[str, float] = {}
        with self._timed("build"):
            self.model = self.fresh_model(seed=0)
            self.originals = {name: (m.in_features, m.out_features) for name, m in linears(self.model).items()}
            mark_skipped(self.model, own.leave if own is not None else ())
            self.compiled = self.case.compile and self.fault_points.compiles
            self._prepared: Prepared | None = None
            self.conversion = self._converted()
            self.switches["accelerate"] = accelerate_precision()
            self.precision = self.fault_points.precision(self, self._precision())
            if self.case.activation_checkpointing:
                checkpoint_activations(self.model, *self.fault_points.checkpointing(self, self.backend.recompute()))
            if self.compiled and not self.backend.compiles_itself:
                compile_blocks(self.model)
            prepared = self._prepared or Prepared(self.model, self.conversion)
            self.loss_of = prepared.loss_of or self.setup.loss()
            self.backward = prepared.backward
            self.optimizer = self.fault_points.optimizer(
                self, lambda: prepared.optimizer or self.setup.optimizer(self.model)
            )
            self._renews_optimizer = own is not None and prepared.optimizer is None
        self._timing_batches = [self.timing_batch(step) for step in range(4)]
        with self._timed("warm-up"):
            if self.case.emulated and explain_failure is not None:
                explain_failure(self)
            try:
                for batch in self._timing_batches[:3]:
                    self._warm_up(batch)
                self.synchronize()
            except Exception as error:
                if explain_failure is not None:
                    explain_failure(self)
                self.backend.explain(error)
                raise
        # What is alive now stays alive: collections before a turn need not walk through it, while the GPU stands idle.
        gc.collect()
        gc.freeze()
        self.fault_points.warm(self)

    def _converted(self) -> Conversion:
        """Switch the model to the case's precision; what else that did to weights and layers is seen from before and
        after."""
        before, more = trainable(self.model), besides(self.model)
        conversion: Conversion = self.fault_points.convert(self, self._convert)
        after = trainable(self.model)
        conversion.unfrozen = [name for name in after if after[name] and not before.get(name, True)]
        conversion.lost = lost(more, self.model, conversion.converted)
        return conversion

    # -- what to train --------------------------------------------------------------------------------------------

    def fresh_model(self, seed: int) -> torch.nn.Module:
        """The unconverted model with the weights of ``seed``: bfloat16, on this arm's device."""
        return self.setup.fresh_model(seed)

    def training_batch(self, seed: int, step: int) -> Any:
        """The batch of one step of a loss curve; the same in every arm."""
        return self.setup.training_batch(*self.fault_points.batch(seed, step))

    def timing_batch(self, step: int) -> Any:
        return self.setup.timing_batch(step)

    def restart(self, seed: int, jitter: bool = False) -> None:
        """Back to step 0 with the weights of ``seed``: optimizer and scaling state forgotten, compiled code kept.

        ``jitter`` moves each weight by at most about one unit in its last BF16 place: the same training to a person,
        another one to rounding. It shows how far two honest BF16 runs drift apart.
        """
        drawn = self.backend.drawn(self.model, seed)
        fresh = self.fresh_model(seed) if drawn is None else None
        with torch.no_grad():
            live = dict(split(self.model.named_parameters(remove_duplicate=False), self.joined))
            if drawn is not None:
                live = {name: live[name] for name in drawn}
            # Never by a model's truth value: one with a length may be empty, and a compiled one fails when asked.
            new = fresh.named_parameters(remove_duplicate=False) if fresh is not None else (drawn or {}).items()
            for name, value in new:
                target = live.pop(name)
                target.copy_(value)
                if jitter:
                    noise = torch.rand_like(value, dtype=torch.float32).mul_(2).sub_(1).mul_(2.0**-8).add_(1)
                    target.copy_(value * noise)
            if live:
                raise RuntimeError(f"converted parameters that the fresh model does not have: {sorted(live)[:3]}")
            buffers = dict(self.model.named_buffers())
            for name, content in fresh.named_buffers() if fresh is not None else ():
                if name in buffers:
                    buffers[name].copy_(content)
        self.optimizer.state.clear()
        if self._renews_optimizer:
            # A schedule moves learning rates, and hangs on the optimizer that it was made for.
            self.optimizer = self.setup.optimizer(self.model)
        self.renew_scales()

    def renew_scales(self) -> None:
        """Scaling state as a fresh model has it once calibrated: after a restart, and after weights were loaded."""
        self.backend.reset(self.model)
        for index in range(self.backend.calibration_passes(self.case.recipe)):
            batch = self.training_batch(seed=0, step=2_000_000 + index)
            if self.own_step is not None:
                with muted(self.optimizer):
                    self.own_step(self.model, batch, self.optimizer, self.precision)
                continue
            with self.precision():
                loss = self.loss_of(self.model, batch)
            loss.backward() if self.backward is None else self.backward(loss)
            # Before the next forward pass, as in training: at 8B gradients are 15 GiB beside the activations.
            self.optimizer.zero_grad(set_to_none=True)

    # -- running --------------------------------------------------------------------------------------------------

    @property
    def own_step(self) -> Step | None:
        """The training step, where it is the user's own function."""
        return self.setup.own.step if self.setup.own is not None else None

    @property
    def joined(self) -> Joined:
        """Parameters of the live model that hold several of the plain one's."""
        return self.backend.joined(self.model)

    def step(
        self,
        batch: Any,
        phase: training.Phase = nullcontext,
        on_gradients: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        if self.own_step is not None:
            own_loss, _ = self._run_own(self.own_step, batch, phase, on_gradients)
            self.fault_points.stepped(self)
            return own_loss
        loss = training.training_step(
            self.model,
            batch,
            loss_of=self.loss_of,
            optimizer=self.optimizer,
            precision=self.precision,
            phase=phase,
            on_gradients=on_gradients,
            backward=self.backward,
        )
        schedule = schedule_of(self.optimizer)
        if schedule is not None:
            schedule.step()
        self.fault_points.stepped(self)
        return loss

    def _warm_up(self, batch: Any) -> None:
        """One of the first steps; a hand-written one must be whole."""
        if self.own_step is None:
            self.step(batch)
            return
        require_whole(self.own_step, *self._run_own(self.own_step, batch))

    def _run_own(
        self,
        step: Step,
        batch: Any,
        phase: training.Phase = nullcontext,
        on_gradients: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, Seen]:
        return run_step(step, self.model, batch, self.optimizer, self.precision, phase, on_gradients)

    def curve(self, seed: int, steps: int, jitter: bool = False, first_step: int = 0) -> dict[str, Any]:
        """Losses (nats) and gradient norms of ``steps`` training steps from the weights of ``seed``."""
        if first_step == 0:
            self.restart(seed, jitter)
        losses: list[torch.Tensor] = []
        norms: list[torch.Tensor] = []
        fingerprint = 0

        def note_norm() -> None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(gradients).float())

        for step in range(first_step, first_step + steps):
            batch = self.training_batch(seed, step)
            fingerprint = data.fingerprint(batch, fingerprint)
            self.fault_points.before_step(self, seed, step)
            losses.append(self.step(batch, on_gradients=note_norm).float())
            # A hand-written step may step its optimizer twice, or not at all where its loss is not finite.
            last = norms[step - first_step :][-1:] or [losses[-1].new_tensor(float("nan"))]
            norms[step - first_step :] = last
        return {
            "seed": seed,
            "losses": [float(x) for x in torch.stack(losses).cpu()],
            "gradient_norms": [float(x) for x in torch.stack(norms).cpu()],
            "data": fingerprint,
            "trained": trained(self.model, self.optimizer, self.joined),
        }

    def blocks(self, count: int, steps: int, dropped: int) -> list[float]:
        """Milliseconds per step of ``count`` blocks of ``steps`` steps each, by CUDA events.

        ``dropped`` steps before the first block do not count: they fill the queue and grow memory again. Python's
        garbage collector is held meanwhile: its full passes come every few steps and would count as one arm's time.
        """
        batches = self._timing_batches
        gc.collect()
        gc.disable()
        try:
            for index in range(dropped):
                self.step(batches[-1 - index])
            return timed_blocks(lambda i, phase: self.step(batches[i % len(batches)], phase=phase), count, steps)
        finally:
            gc.enable()

    def memory(self) -> dict[str, Any]:
        """Bytes at their peak in each phase of one step, and resident between steps. A GPU's alone."""
        self.park()
        self.step(self._timing_batches[0])
        return memory.of_step(self.synchronize, lambda phase: self.step(self._timing_batches[1], phase=phase))

    def park(self) -> None:
        """Give memory that is only cached back to the device, so that the pair's other arm can use it."""
        # The model's and not the optimizer's alone, which may not know every parameter that gets a gradient.
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # -- set-up ---------------------------------------------------------------------------------------------------

    def _require_device(self) -> None:
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"this arm must run on a GPU and torch {torch.__version__} sees none "
                f"(built for CUDA {torch.version.cuda}); it will not fall back to the CPU"
            )
        if self.spec.threads:
            torch.set_num_threads(self.spec.threads)

    def _require_recipe(self) -> None:
        usable, reason = self.backend.usable(self.case.recipe, self.case.emulated)
        if not usable:
            raise RuntimeError(f"recipe {self.case.recipe!r} cannot run here: {reason}")

    def _convert(self) -> Conversion:
        own = self._own_fp8()
        if own is not None and own.convert is not None:
            self.model = own.converted(self.model)
            return observed_conversion(self.model, self.originals, self.backend.is_fp8_layer, own.leave)
        self._prepared = self.backend.prepare(self.model, self.setup.optimizer, self.case, self.compiled)
        self.model = self._prepared.model
        if self._prepared.layers is not None:
            self.originals = dict(self._prepared.layers)
        return self._prepared.conversion

    def _precision(self) -> Callable[[], Any]:
        own = self._own_fp8()
        if own is not None and own.precision is not None:
            return own.precision
        return self.backend.precision(self.case.recipe, self.case.full_options)

    def _own_fp8(self) -> Workload | None:
        """The workload, whose own way of switching FP8 on counts in the FP8 arm alone."""
        return self.setup.own if recipe_facts(self.case.backend, self.case.recipe).roles else None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
