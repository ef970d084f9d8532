"""What an arm answers to each operation of the protocol, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends.accelerate_state import forget_accelerate
from pytest_fp8.libraries import library_versions
from pytest_fp8.shipping import ship, unship
from pytest_fp8.worker import checkpoints, memory
from pytest_fp8.worker.engine import Engine
from pytest_fp8.worker.layers import layers
from pytest_fp8.worker.step import first_output
from pytest_fp8.worker.timing import timed_blocks
from pytest_fp8.worker.token_count import explain_rows, require_aligned_rows


class ArmServer:
    """An engine and the operations that pytest's process can ask of it."""

    def __init__(self, spec: ArmSpec) -> None:
        forget_accelerate()  # this process may have been another arm, with another precision
        self.engine = Engine(spec, explain_failure=require_aligned_rows)
        self.engine.park()

    def answer(self, operation: str, arguments: dict[str, Any]) -> Any:
        operations: dict[str, Callable[..., Any]] = {
            "layers": self.layers,
            "curve": self.engine.curve,
            "blocks": self.blocks,
            "memory": self.memory,
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
        try:
            result = operations[operation](**arguments)
        except (RuntimeError, AssertionError, ValueError):
            explain_rows(self.engine)
            raise
        self.engine.backend.drop_pending_recomputation()
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
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if engine.device.type == "cuda" else None,
            "parameters": sum(p.numel() for p in engine.model.parameters()),
            "compiled": engine.compiled,
            "seconds": engine.seconds,
            "first_step": engine.first_step,
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

    def layers(self) -> dict[str, Any]:
        """Conversion, recipes in force, and the products that one training step executed."""
        return layers(self.engine)

    def blocks(self, count: int, steps: int, dropped: int) -> list[float]:
        """Milliseconds per step of ``count`` blocks of ``steps`` steps, after ``dropped`` steps that do not count."""
        return timed_blocks(self.engine.step, self.engine.timing_batches, count, steps, dropped)

    def memory(self) -> dict[str, Any]:
        """Peak bytes in each phase of one step, and bytes resident between steps. On a GPU only."""
        engine = self.engine
        first, second, *_ = engine.timing_batches
        engine.park()
        engine.step(first)
        return memory.of_step(engine.synchronize, lambda phase: engine.step(second, phase))

    def save(self, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
        return checkpoints.save(self.engine, folder, store, optimizer)

    def load(self, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
        return checkpoints.load(self.engine, folder, store, optimizer)

    def logits(self, seed: int) -> bytes:
        """The model's output on the first rows of one held-out batch: float32, at most 64 x 4096 values."""
        engine = self.engine
        batch = engine.training_batch(seed, step=1_000_000)
        # Uncompiled: to compile a forward pass without gradients for one batch would take longer than all else here.
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
        """Go on training from where the arm is; the curve of the steps from ``first_step`` on."""
        return self.engine.curve(seed, steps, first_step=first_step)

    def call(self, function: str) -> str:
        """Run a shipped function of the user on the live model; its result is shipped back."""
        return ship(unship(function)(self.engine.model), "the function's result")
