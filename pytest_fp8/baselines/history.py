"""What the stored histories of a GPU say of its noise: the variance components."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.source import Source
from pytest_fp8.baselines.store import parse_text
from pytest_fp8.errors import BaselineError
from pytest_fp8.plain import PlainDataError
from pytest_fp8.stats.components import Components, History, components_of


def estimated(baselines: Iterable[Baseline]) -> Components:
    """The components of these baselines of one GPU. All cases of one run name its session alike."""
    found: dict[str, list[History]] = {"speedup": [], "busy_speedup": []}
    for baseline in baselines:
        if metric := baseline.gated:
            sessions = baseline.measured_in(metric)
            found[metric].append({f"{s.date} {s.commit} {s.run}": s.metrics[metric] for s in sessions})
    return components_of(found["speedup"], found["busy_speedup"])


def components_in(source: Source, gpu: str) -> Components:
    """The components of a GPU's stored baselines. A file that cannot be read is left out: the tests of its case, and
    ``check``, fail with it."""
    found: list[Baseline] = []
    for name in source.names():
        if name.parts[:-1] == (gpu,):
            try:
                found.append(parse_text(source.text(name) or "", str(name)))
            except (BaselineError, PlainDataError):
                continue
    return estimated(found)
