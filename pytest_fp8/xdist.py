"""pytest-xdist on a host with several GPUs: each worker gets GPUs of its own, and each case one worker."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from pytest_fp8 import gpu as gpus

if TYPE_CHECKING:
    import pytest

SHARE = "fp8_share"
"""In what a worker is given at its start: the number of its share of the GPUs."""


def take_share(worker: dict[str, Any]) -> None:
    """In a worker: leave it its share of the GPUs. Its arms inherit ``CUDA_VISIBLE_DEVICES``."""
    visible = gpus.visible()
    if len(visible) > 1:
        each = max(1, len(visible) // int(worker["workercount"]))
        # Without -n, as with --tx, nobody shares them out.
        share = worker.get(SHARE, int(worker["workerid"].removeprefix("gw")))
        first = share * each % len(visible)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + each])
        gpus.detect.cache_clear()


class Shares:
    """In the controller: a plugin that gives each worker a share of the GPUs. One that stands in for a worker that has
    crashed takes over that worker's."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        """Worker -> its share, by number."""

    def pytest_configure_node(self, node: Any) -> None:
        share = next(number for number in count() if number not in self._taken.values())
        self._taken[node.gateway.id] = node.workerinput[SHARE] = share

    def pytest_testnodedown(self, node: Any) -> None:
        self._taken.pop(node.gateway.id, None)


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

        def remove_node(self, node: Any) -> Any:
            """After a crash: the test that ran then, which counts as done, for it would take one worker after another
            with it. xdist itself would give finished cases out again, without a test, and wait for them."""
            work = self.assigned_work.get(node, {})
            crashed = next((test for tests in work.values() for test, done in tests.items() if not done), None)
            if crashed is not None:
                work[together(crashed)][crashed] = True
            for finished in [unit for unit, tests in work.items() if all(tests.values())]:
                del work[finished]
            super().remove_node(node)
            return crashed

        def _reschedule(self, node: Any) -> None:
            """A worker runs its last test once it has a further one, or knows that there is none."""
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                if not self.workqueue:
                    node.shutdown()
                    break
                self._assign_work_unit(node)

        def _assign_work_unit(self, node: Any) -> None:
            # A worker may have died before xdist was told, which then takes the unit back.
            with contextlib.suppress(OSError):
                super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return ByCase(config, log)


def end_workers(config: pytest.Config) -> None:
    """In a controller that was told to end: tell its workers on this host, which then close their arms. xdist itself
    waits for the test that each of them runs."""
    for node in getattr(config.pluginmanager.get_plugin("dsession"), "_active_nodes", ()):
        process = getattr(getattr(node.gateway, "_io", None), "popen", None)
        if process is not None:
            process.terminate()
