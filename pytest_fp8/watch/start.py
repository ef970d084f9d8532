"""Inside the script's process: begins to watch it, or to hold it where a pytest wants that."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pytest_fp8.watch.observer import HOLD, Observer, attach, guarded


def start(module: Any, folder: str) -> None:
    """Watch this process; ``module`` is ``torch.optim.optimizer``, just imported."""
    import torch

    address = os.environ.get(HOLD)
    if not address:
        attach(Observer(folder), module)
        return
    begun: list[Callable[..., None]] = []

    def begin(_: Observer) -> None:
        # Once torch is whole, which it is not yet while this module is imported.
        from pytest_fp8.watch.held import Held

        held = Held(folder, address)
        attach(held, module)
        begun.append(guarded(held, Held.optimizer_steps))

    first = guarded(Observer(folder), begin)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            if not begun:
                first()
            for steps in begun:
                steps(optimizer)

    module.register_optimizer_step_pre_hook(hook)
