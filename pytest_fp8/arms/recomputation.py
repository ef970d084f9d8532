"""Activation checkpointing as torch does it: what will be recomputed, and what is being recomputed now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint


def checkpointed() -> bool:
    """Whether what is saved now for the backward pass is dropped and recomputed: by the hooks that are in force."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


@contextmanager
def watch_recomputation(phase: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Open ``phase`` around what torch's activation checkpointing recomputes, in the thread that does it.

    torch's own hook is the one place that says so wherever the layers are compiled; a torch without it leaves
    recomputed products in the backward phase, where their extents tell most of them.
    """
    hook = getattr(torch.utils.checkpoint, "_recomputation_hook", None)
    if hook is None:
        yield
        return

    class Marked(hook):  # type: ignore[misc, valid-type]
        def __enter__(self) -> Any:
            self.marked = phase()
            self.marked.__enter__()
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            result = super().__exit__(*error)
            self.marked.__exit__(None, None, None)
            return result

    setattr(torch.utils.checkpoint, "_recomputation_hook", Marked)  # noqa: B010 - private, and not in every torch
    try:
        yield
    finally:
        setattr(torch.utils.checkpoint, "_recomputation_hook", hook)  # noqa: B010
