"""What Accelerate keeps for a whole process: its first Accelerator decides the precision of all later ones."""

from __future__ import annotations

import sys


def accelerate_precision() -> str:
    """The mixed precision that Accelerate trains in, where this process uses it; else an empty string."""
    state = sys.modules.get("accelerate.state")
    return str(state.AcceleratorState._shared_state.get("_mixed_precision", "")) if state is not None else ""


def forget_accelerate() -> None:
    """Reset Accelerate's state. A process that becomes one arm after another needs each to decide anew."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
