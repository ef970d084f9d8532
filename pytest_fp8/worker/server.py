"""What an arm answers to each operation of the protocol, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.errors import SettingsError
from pytest_fp8.own_code import require_own_code
from pytest_fp8.plain import to_plain
from pytest_fp8.said import Told
from pytest_fp8.shipping import ship, unship_in_arm
from pytest_fp8.worker.answers.alone import alone
from pytest_fp8.worker.answers.layers import layers
from pytest_fp8.worker.answers.ledger import ledger_of
from pytest_fp8.worker.answers.numerics import held_out_output, moved, numerics
from pytest_fp8.worker.checkpoint import roundtrip
from pytest_fp8.worker.curve import curve
from pytest_fp8.worker.notes import process_facts
from pytest_fp8.worker.record import clock
from pytest_fp8.worker.record.allocations import kinds_at_peak
from pytest_fp8.worker.run.engine import Engine, engine_type
from pytest_fp8.worker.tensors import foreign, held
from pytest_fp8.worker.token_count import explain_rows, require_aligned_rows


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
        self.engine.settle()
        # After every question cached memory is given back: the pair's other arm may need it. Not between blocks, where
        # the pair asks for it if it must.
        if operation != "blocks":
            self.engine.park()
        return result

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """An operation as a function of its arguments; gives plain data."""
        if name not in OPERATIONS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return lambda *args, **kwargs: to_plain(OPERATIONS[name](self.engine, *args, **kwargs))

    def describe(self) -> dict[str, Any]:
        """Versions and sizes."""
        engine = self.engine
        return {
            **process_facts(),
            "parameters": sum(held(each).shape.numel() for each in engine.model.parameters()),
            "compiled": engine.compiled,
            "first_step": engine.first_step,
            "own_checkpoints": roundtrip.are_given(engine),
            "foreign_parameters": bool(foreign(engine.model, engine.optimizer)),
        }


def _memory(engine: Engine) -> dict[str, Any]:
    """Peak bytes in each phase of one step, and bytes resident between steps; of one more step what is in memory at its
    peak. On a GPU only."""
    first, second, *_ = engine.timing_batches
    clock.forget_workspaces(engine.synchronize)
    engine.park()
    engine.step(first)
    told = clock.memory_of_step(engine.synchronize, lambda phase: engine.step(second, phase))
    return {**told, "kinds": kinds_at_peak(engine, second, told["peak_allocated"])}


def _logits(engine: Engine, seed: int) -> bytes:
    """A fingerprint of what entered the model, in four bytes, and its output on the first rows of one held-out batch:
    float32, at most 64 x 4096 values."""
    output, given = held_out_output(engine, seed)
    return given.to_bytes(4, "little") + bytes(output.cpu().numpy().tobytes())


def _call(engine: Engine, function: str) -> str:
    """Run a shipped function of the user on the live model; its result is shipped back."""
    result = unship_in_arm(function)(engine.model)
    try:
        return ship(result, "the function's result")
    except SettingsError as error:
        kind = type(result).__name__
        raise UnsendableError(f"the function's result, a {kind}, cannot be sent back: {error.seen}") from None


OPERATIONS: dict[str, Callable[..., Any]] = {
    # A control may override these two.
    "park": lambda engine: engine.park(),
    "restart": lambda engine, seed, jitter=False: engine.restart(seed, jitter),
    "layers": layers,
    "ledger": ledger_of,
    "numerics": numerics,
    "moved": moved,
    "curve": curve,
    "blocks": lambda engine, **how: clock.made(clock.timed_blocks(**how), engine),
    "busy": lambda engine, **how: clock.made(clock.busy_steps(**how), engine),
    "memory": _memory,
    "alone": alone,
    "save": roundtrip.save,
    "load": roundtrip.load,
    "logits": _logits,
    "resume": roundtrip.resumed,
    "call": _call,
}
"""What pytest's process may ask for: functions of the engine and of the request's arguments."""
