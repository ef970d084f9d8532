"""pytest-xdist on a host with several GPUs: each worker gets GPUs of its own, and each case one worker."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_fp8 import gpu as gpus

if TYPE_CHECKING:
    import pytest


def take_share(worker: dict[str, Any]) -> None:
    """In a worker: leave it its share of the GPUs. Its arms inherit ``CUDA_VISIBLE_DEVICES``."""
    visible = gpus.visible()
    if len(visible) > 1:
        each = max(1, len(visible) // int(worker["workercount"]))
        first = int(worker["workerid"].removeprefix("gw")) * each % len(visible)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + each])
        gpus.detect.cache_clear()


def case_of(nodeid: str) -> str:
    """The case of a test, which stands in the brackets at the end of its id, without the question that ``fp8_check``
    adds; the whole id where there is none."""
    from pytest_fp8.case import OWN
    from pytest_fp8.zoo.shapes import SHAPES

    found = re.fullmatch(r".*?\[((\w+)[.-].*?)(-(layers|numerics|loss|faster|speedup|memory|checkpoints))?\]", nodeid)
    return found[1] if found and found[2] in (*SHAPES, OWN) else nodeid


def by_case(config: pytest.Config, log: Any, together: Callable[[str], str] = case_of) -> Any:
    """A scheduler of pytest-xdist that gives all tests of a case to one worker, which keeps its arms. ``together``: the
    same text for tests of one worker.

    xdist's own ``loadgroup`` would serve, and does nothing under pytest 9.2 (xdist 3.8).
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByCase(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    config.option.loadscopereorder = False
    return ByCase(config, log)


def end_workers(config: pytest.Config) -> None:
    """In a controller that was told to end: tell its workers on this host, which then close their arms. xdist itself
    waits for the test that each of them runs."""
    for node in getattr(config.pluginmanager.get_plugin("dsession"), "_active_nodes", ()):
        process = getattr(getattr(node.gateway, "_io", None), "popen", None)
        if process is not None:
            process.terminate()
