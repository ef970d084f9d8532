"""The environment variables of an arm's process."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment

FEW_CORES = 4
"""With more, two arms and their neighbours have cores enough to spin on."""


def arm_environment() -> dict[str, str]:
    """This process's environment, with the one addition that keeps two cuDNN libraries out of one arm.

    Transformer Engine looks for a system cuDNN before the one torch came with. Where both exist, torch finds itself
    with a version it was not built for and picks another attention kernel without a word, or loading fails.
    ``CUDNN_HOME`` and ``LD_LIBRARY_PATH`` name torch's own, in every arm: torch works with no other.
    """
    import importlib.util

    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if len(os.sched_getaffinity(0)) <= FEW_CORES:
        # Threads that wait for each other by spinning take the cores from those they wait for, once anything else
        # runs beside them: 1.3 s became 41 s on two busy cores.
        environment.setdefault("OMP_WAIT_POLICY", "passive")
    spec = None
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec("nvidia.cudnn")
    if spec is not None and spec.submodule_search_locations:
        _point_at_cudnn(environment, next(iter(spec.submodule_search_locations)))
    return environment


def other_environment(chosen: ArmEnvironment, instrument: str) -> dict[str, str]:
    """The same for an arm of another interpreter or checkout: its own cuDNN, its own import path."""
    environment = {**os.environ, **chosen.variables(instrument)}
    if chosen.cudnn:
        _point_at_cudnn(environment, chosen.cudnn)
    return environment


def _point_at_cudnn(environment: dict[str, str], home: str) -> None:
    environment["CUDNN_HOME"] = home
    # Its parts (libcudnn_graph, ...) are found by the loader, which knows nothing of CUDNN_HOME.
    paths = [str(Path(home) / "lib"), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
