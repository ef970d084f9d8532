"""A baseline: the sessions in which a case was measured on one kind of GPU, as records, to JSON and back. Strict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pytest_fp8.baselines.metrics import METRICS
from pytest_fp8.baselines.provenance import Origin
from pytest_fp8.plain import PlainDataError, between, from_plain, plain_value, sized, strict_json, to_plain

SCHEMA = 3
# 2: a step no longer waits for the GPU.
# 3: arms whose step time drifts within a turn are timed in longer turns; the first 1.5 s of each are dropped.
# 4: busy times of several GPUs leave out waits for late hosts, and casts beside other kernels.
MEASUREMENT = 4
"""How stored figures are taken. Raised, with a line above, by a change that moves one. Sessions of an older number are
still gated on; ``check`` and ``list CASE`` name them."""
MAX_SESSIONS = 8
"""A file keeps so many; a further one takes the place of the oldest."""


def _metrics(value: Mapping[str, Any], where: str) -> None:
    for name, values in value.items():
        if name not in METRICS:
            raise PlainDataError(f"{where} has no field {name!r:.60}")
        plain_value(METRICS[name].values, values, f"{where}.{name}")


@dataclass(frozen=True)
class StoredSession(Origin):
    """What one session measured, and where it comes from. It never changes once it is stored."""

    metrics: Annotated[Mapping[str, Sequence[Any]], sized(1, len(METRICS)), _metrics]
    """Raw values of what this session measured itself: one per seed or process, or one list of blocks per process."""
    measurement: Annotated[int, between(1, 1e6)] = MEASUREMENT
    host_bound: bool = False
    """Whether the host set an arm's pace, in it or in one before it: busy time then says more of FP8 than step time."""
    starts: tuple[str, ...] = ()
    """The metrics of which a new level begins here: they moved by more than noise."""

    @property
    def origin(self) -> str:
        return f"{self.date}, commit {self.commit or 'unknown'}"


@dataclass(frozen=True)
class Baseline:
    """What a case once measured on one kind of GPU: its sessions, the oldest first."""

    case: str
    case_hash: str
    gpu: str
    sessions: Annotated[tuple[StoredSession, ...], sized(1, MAX_SESSIONS)] = ()

    @property
    def newest(self) -> StoredSession:
        return self.sessions[-1]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics that any session measured."""
        return tuple(sorted({name for session in self.sessions for name in session.metrics}))

    def measured_in(self, metric: str) -> list[StoredSession]:
        """The sessions of the metric's current level, the oldest first; empty where there is none. All metrics of a
        question begin a new level together."""
        found: list[StoredSession] = []
        together = {name for name, each in METRICS.items() if each.question == METRICS[metric].question}
        for session in reversed(self.sessions):
            if metric in session.metrics:
                found.insert(0, session)
            if together & set(session.starts):
                break
        return found

    @property
    def host_bound(self) -> bool:
        """Whether a session of the current level is."""
        return any(session.host_bound for session in self.measured_in("busy_speedup"))

    @property
    def gated(self) -> str:
        """The metric that a speedup is gated on; empty where none is stored."""
        on_busy = self.host_bound and self.history("busy_speedup")
        return "busy_speedup" if on_busy else "speedup" if self.history("speedup") else ""

    def values(self, metric: str) -> list[Any]:
        """The raw values of the newest session that has the metric; empty where none has it."""
        return (self.history(metric) or [[]])[-1]

    def history(self, metric: str) -> list[list[Any]]:
        """The raw values of every session of the metric's current level, the oldest first."""
        return [list(session.metrics[metric]) for session in self.measured_in(metric)]


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a file's content without its digest, as canonical JSON."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class _File(Baseline):
    schema: Annotated[int, between(SCHEMA, SCHEMA)] = SCHEMA
    digest: str = ""


def to_text(baseline: Baseline) -> str:
    """The file of a baseline."""
    content = {"schema": SCHEMA, **to_plain(baseline)}
    return json.dumps({**content, "digest": digest(content)}, indent=1, sort_keys=True, allow_nan=False) + "\n"


def from_text(text: str | bytes) -> Baseline:
    """The baseline in a file of schema 3. Raises ``ValueError``, which names the field, and ``RecursionError``."""
    data = strict_json(text)
    found = from_plain(_File, data, "the baseline")
    if found.digest != digest(data):
        raise PlainDataError("the digest is not that of the content: it was edited by hand")
    return Baseline(found.case, found.case_hash, found.gpu, found.sessions)
