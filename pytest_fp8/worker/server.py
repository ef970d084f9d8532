"""What an arm answers to each operation of the protocol, as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.case import OWN_STORE
from pytest_fp8.errors import SettingsError
from pytest_fp8.libraries import library_versions
from pytest_fp8.own_code import require_own_code
from pytest_fp8.plain import to_plain
from pytest_fp8.said import Told
from pytest_fp8.shipping import ship, unship_in_arm
from pytest_fp8.worker.answers.layers import layers
from pytest_fp8.worker.answers.ledger import ledger_of
from pytest_fp8.worker.answers.numerics import numerics
from pytest_fp8.worker.answers.recorded import SEED
from pytest_fp8.worker.answers.token_count import explain_rows, require_aligned_rows
from pytest_fp8.worker.answers.yardstick import further_moved_gradients, moved_losses, moved_outputs, moved_resumes
from pytest_fp8.worker.checkpoint import own, roundtrip
from pytest_fp8.worker.curve import curve
from pytest_fp8.worker.record import clock
from pytest_fp8.worker.record.held_out import compared, held_out_output
from pytest_fp8.worker.run.engine import engine_type
from pytest_fp8.worker.tensors import foreign
from pytest_fp8.worker.training.ranks import share_buffers
from pytest_fp8.worker.training.zero import shape


class UnsendableError(Told, TypeError):
    """A result of a function of the user that no other process can be given."""


class ArmServer:
    """An engine and the operations that pytest's process can ask of it."""

    def __init__(self, spec: ArmSpec) -> None:
        self.engine = engine_type(spec.control)(spec, explain_failure=require_aligned_rows)
        require_own_code()
        self.engine.park()

    def answer(self, operation: str, arguments: dict[str, Any]) -> Any:
        """What the method of that name gives."""
        if operation not in OPERATIONS:
            raise ValueError(f"unknown operation {operation!r}")
        try:
            result = getattr(self, operation)(**arguments)
        except (RuntimeError, AssertionError, ValueError):
            if self.engine.case.gpus == 1:
                explain_rows(self.engine)
            raise
        self.engine.backend.settle(self.engine.model)
        # After every question cached memory is given back: the pair's other arm may need it. Not between blocks, where
        # the pair asks for it if it must.
        if operation != "blocks":
            self.engine.park()
        return result

    def describe(self) -> dict[str, Any]:
        """Versions, sizes, and the seconds that each stage of construction took."""
        engine = self.engine
        facts: dict[str, Any] = {
            "libraries": library_versions(),
            "cudnn": torch.backends.cudnn.version() if engine.device.type == "cuda" else None,
            "parameters": sum(shape(each).numel() for each in engine.model.parameters()),
            "compiled": engine.compiled,
            "seconds": engine.seconds,
            "first_step": engine.first_step,
            "own_checkpoints": own.are_given(engine),
            "foreign_parameters": bool(foreign(engine.model, engine.optimizer)),
        }
        if engine.device.type == "cuda":
            facts["memory"] = {
                "allocated": torch.cuda.memory_allocated(),
                "peak": torch.cuda.max_memory_reserved(),
                "step": torch.cuda.max_memory_allocated(),
            }
        return facts

    def park(self) -> None:
        """Give cached memory back."""
        self.engine.park()

    def restart(self, seed: int, jitter: bool = False) -> None:
        """Start training anew."""
        self.engine.restart(seed, jitter)

    def layers(self) -> dict[str, Any]:
        """Conversion, recipes in force, and the products that one training step executed."""
        return layers(self.engine)

    def numerics(self, moved: bool, seed: int = SEED) -> dict[str, Any]:
        """Samples of the FP8 layers' products in one step against the exact ones, and sketches of its gradients."""
        return numerics(self.engine, moved, seed)

    def moved_gradients(self, draws: int, operands: int = 0, seed: int = SEED) -> list[dict[str, Any]]:
        """Sketches of the gradients from weights, and from operands, that are moved in as many ways by as much as FP8
        moves products."""
        return further_moved_gradients(self.engine, draws, operands, seed)

    def curve(self, seed: int, steps: int, **more: Any) -> dict[str, Any]:
        """The losses of a run from a seed."""
        return curve(self.engine, seed, steps, **more)

    def moved_losses(self, seed: int, step: int, draws: int) -> list[float]:
        """The loss of a step of a curve, from its weights and from these moved by as much as FP8 moves products."""
        return moved_losses(self.engine, seed, step, draws)

    def ledger(self) -> dict[str, Any]:
        """What one instrumented step did and what stands around it: an :class:`ArmLedger`."""
        return cast(dict[str, Any], to_plain(ledger_of(self.engine)))

    def blocks(self, count: int, steps: int, dropped: int) -> dict[str, Any]:
        """Milliseconds per step of ``count`` blocks of ``steps`` steps, after ``dropped`` steps that do not count; and
        how often code was compiled in these blocks."""
        return clock.timed_blocks(self.engine.step, self.engine.timing_batches, count, steps, dropped)

    def busy(self, steps: int) -> dict[str, list[float]]:
        """How long the GPU works in each of several steps. On a GPU only."""
        return clock.busy_steps(self.engine, steps)

    def memory(self) -> dict[str, Any]:
        """Peak bytes in each phase of one step, and bytes resident between steps. On a GPU only."""
        engine = self.engine
        first, second, *_ = engine.timing_batches
        clock.forget_workspaces(engine.synchronize)
        engine.park()
        engine.step(first)
        return clock.memory_of_step(engine.synchronize, lambda phase: engine.step(second, phase))

    def save(self, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
        share_buffers(self.engine.model)
        if store == OWN_STORE:
            return cast(dict[str, Any], to_plain(own.save(self.engine, Path(folder), optimizer)))
        return cast(dict[str, Any], to_plain(roundtrip.save(self.engine, Path(folder), store, optimizer)))

    def load(self, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
        if store == OWN_STORE:
            return cast(dict[str, Any], to_plain(own.load(self.engine, Path(folder), optimizer)))
        return cast(dict[str, Any], to_plain(roundtrip.load(self.engine, Path(folder), store, optimizer)))

    def logits(self, seed: int) -> bytes:
        """A fingerprint of what entered the model, in four bytes, and its output on the first rows of one held-out
        batch: float32, at most 64 x 4096 values."""
        output, given = held_out_output(self.engine, seed)
        return given.to_bytes(4, "little") + bytes(compared(output).cpu().numpy().tobytes())

    def moved_outputs(self, seed: int, draws: int) -> list[float]:
        """How far these logits move with weights that are moved in as many ways by as much as FP8 moves products."""
        return moved_outputs(self.engine, seed, draws)

    def moved_resumes(self, seed: int, first_step: int, steps: int, draws: int) -> list[float]:
        """How far the mean loss of these steps moves with weights that are moved before them in as many ways."""
        return moved_resumes(self.engine, seed, first_step, steps, draws)

    def resume(self, seed: int, first_step: int, steps: int) -> dict[str, Any]:
        """Go on training from where the arm is: losses from ``first_step`` on, and what these steps were given."""
        return cast(dict[str, Any], to_plain(own.resumed(self.engine, seed, first_step, steps)))

    def call(self, function: str) -> str:
        """Run a shipped function of the user on the live model; its result is shipped back."""
        result = unship_in_arm(function)(self.engine.model)
        try:
            return ship(result, "the function's result")
        except SettingsError as error:
            kind = type(result).__name__
            raise UnsendableError(f"the function's result, a {kind}, cannot be sent back: {error.seen}") from None


OPERATIONS = frozenset(name for name in vars(ArmServer) if name[0] != "_") - {"answer", "describe"}
"""What pytest's process may ask for."""
