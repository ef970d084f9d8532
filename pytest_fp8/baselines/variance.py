"""The variance components of a GPU, from the histories that are stored of it."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.source import Source
from pytest_fp8.baselines.store import parse_text
from pytest_fp8.baselines.strict import Unsound
from pytest_fp8.errors import BaselineError
from pytest_fp8.stats.components import Components, History, components_of


def history_of(baseline: Baseline, metric: str) -> History:
    """Session -> its processes, of the metric's current level, oldest first. All cases of one run name it alike."""
    return {f"{s.date} {s.commit} {s.run}": s.metrics[metric] for s in baseline.measured_in(metric)}


def estimated(baselines: Iterable[Baseline]) -> Components:
    """The components of these baselines of one GPU."""
    found: dict[str, list[History]] = {"speedup": [], "busy_speedup": []}
    for baseline in baselines:
        if baseline.gated:
            found[baseline.gated].append(history_of(baseline, baseline.gated))
    return components_of(found["speedup"], found["busy_speedup"])


def components_in(source: Source, gpu: str) -> Components:
    """The components of a GPU's stored baselines. A file that cannot be read is left out: the tests of its case,
    and ``check``, fail with it."""
    found = []
    for name in source.names():
        if name.parts[:-1] == (gpu,):
            try:
                found.append(parse_text(source.text(name) or "", str(name)))
            except (BaselineError, Unsound):
                continue
    return estimated(found)
