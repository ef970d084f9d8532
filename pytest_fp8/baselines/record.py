"""A baseline: the sessions in which a case was measured on one kind of GPU, as records, to JSON and back. Strict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.baselines.metrics import BUSY, METRICS, QUIET_BUSY, check_agreement
from pytest_fp8.baselines.strict import (
    NAME,
    Check,
    Unsound,
    date,
    listed,
    named,
    number,
    one_of,
    printable,
    quoted,
    record,
    words,
)

SCHEMA = 2
# 2: a step no longer waits for the GPU.
# 3: arms whose step time drifts within a turn are timed in longer turns; the first 1.5 s of each are dropped.
# 4, several GPUs alone: busy times leave out waits for late hosts and casts beside other kernels.
MEASUREMENT = 4
"""How stored figures are taken. Raised, with a line above, by a change that moves one. Sessions of an older number are
still gated on; the session, ``check`` and ``show`` name them."""
ONE_GPU = 3
"""The oldest number whose figures of one GPU are today's."""
NO_WAITS = 4
"""The oldest number whose busy times of several GPUs have no waits for late hosts in them."""
MAX_SESSIONS = 8
"""A file keeps so many; a further one takes the place of the oldest."""
LONGEST = {"commit": 80, "reason": 500, "unfit": 1000}
"""Characters."""


@dataclass(frozen=True)
class StoredSession:
    """What one session measured, and where it comes from. It never changes once it is stored."""

    date: str
    commit: str
    dirty: bool | None
    """Whether files of the checkout were changed; ``None``: not known."""
    reason: str
    gpu: Mapping[str, Any]
    libraries: Mapping[str, str]
    run: str
    """Random digits, the same for all cases of one session: sessions of one day and commit are told apart by it."""
    metrics: Mapping[str, Sequence[Any]]
    """Raw values of what this session measured itself: one per seed or process, or one list of blocks per process."""
    measurement: int = MEASUREMENT
    starts: tuple[str, ...] = ()
    """The metrics of which a new level begins here: they moved by more than noise."""
    unfit: str = ""
    """Of a candidate: why it must not be stored."""

    def to_json(self) -> dict[str, Any]:
        content = {**vars(self), "starts": list(self.starts)}
        content |= {name: dict(content[name]) for name in ("gpu", "libraries", "metrics")}
        return content if self.unfit else {name: value for name, value in content.items() if name != "unfit"}

    @property
    def several(self) -> bool:
        """Whether it has an account of several GPUs. Without one, their sessions have nothing taken otherwise."""
        return "bf16_wire_ms" in self.metrics

    @property
    def moved_by(self) -> int:
        """The number that has moved these figures since they were taken, or 0 where they are as today's."""
        newest = MEASUREMENT if self.several else ONE_GPU
        if self.measurement < newest:
            return newest
        return self.measurement if self.measurement > MEASUREMENT else 0

    @property
    def figures(self) -> Mapping[str, Sequence[Any]]:
        """The metrics to compare with. Busy times of several GPUs once had waits for late hosts in them, as chance
        would have it: 1.08x and 1.20x in two processes whose step times said 1.20x."""
        waits = self.several and self.measurement < NO_WAITS
        return {name: values for name, values in self.metrics.items() if not (waits and name in BUSY)}

    @property
    def origin(self) -> str:
        return f"{self.date}, commit {self.commit or 'unknown'}"


@dataclass(frozen=True)
class Baseline:
    """What a case once measured on one kind of GPU: its sessions, the oldest first."""

    case: str
    case_hash: str
    gpu: str
    sessions: tuple[StoredSession, ...] = field(default=())

    @property
    def newest(self) -> StoredSession:
        return self.sessions[-1]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics that any session measured."""
        return tuple(sorted({name for session in self.sessions for name in session.figures}))

    def measured_in(self, metric: str) -> list[StoredSession]:
        """The sessions of the metric's current level, the oldest first; empty where there is none.

        Where step time begins a new level, so do the busy times of hosts that nobody waited for: a session without them
        may have moved both."""
        found: list[StoredSession] = []
        for session in reversed(self.sessions):
            if metric in session.figures:
                found.insert(0, session)
            if metric in session.starts or (metric == QUIET_BUSY and "speedup" in session.starts):
                break
        return found

    def values(self, metric: str) -> list[Any]:
        """The raw values of the newest session that has the metric; empty where none has it."""
        return (self.history(metric) or [[]])[-1]

    def history(self, metric: str) -> list[list[Any]]:
        """The raw values of every session of the metric's current level, the oldest first."""
        return [list(session.metrics[metric]) for session in self.measured_in(metric)]

    def to_json(self) -> dict[str, Any]:
        content = {
            "schema": SCHEMA,
            "case": self.case,
            "case_hash": self.case_hash,
            "gpu": self.gpu,
            "sessions": [session.to_json() for session in self.sessions],
        }
        return {**content, "digest": digest(content)}


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a file's content without its digest, as canonical JSON."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def session_of(origin: Mapping[str, Any], metrics: Mapping[str, Sequence[Any]], unfit: str = "") -> StoredSession:
    """A session's record from its provenance and what it measured. Text is cut to what a file may hold."""
    libraries = {name: printable(version, 80) for name, version in origin["libraries"].items()}
    gpu = {name: printable(value, 200) if isinstance(value, str) else value for name, value in origin["gpu"].items()}
    return StoredSession(
        date=origin["date"],
        commit=printable(origin["commit"], LONGEST["commit"]),
        reason=printable(origin["reason"], LONGEST["reason"]),
        dirty=origin["dirty"],
        gpu=gpu,
        libraries=libraries,
        metrics=dict(metrics),
        run=origin["run"],
        unfit=printable(unfit, LONGEST["unfit"]),
    )


class EditedByHand(Unsound):
    """The digest in a file is not that of its content."""


def parse_baseline(data: Any) -> Baseline:
    """A baseline from parsed JSON of schema 2. Raises :class:`Unsound`, which names the field."""
    record(data, "the baseline", _BASELINE)
    if data["digest"] != digest(data):
        raise EditedByHand("digest is not that of the content")
    return Baseline(data["case"], data["case_hash"], data["gpu"], tuple(map(_session, data["sessions"])))


def _session(data: Mapping[str, Any]) -> StoredSession:
    return StoredSession(**{**data, "starts": tuple(data["starts"])})


def _metrics(value: Any, where: str) -> None:
    if not isinstance(value, dict) or not value:
        raise Unsound(f"{where} is {quoted(value)}, not an object with metrics")
    record(value, where, {name: metric.values for name, metric in METRICS.items()}, tuple(METRICS))
    check_agreement(value, where)


def _stored_session(value: Any, where: str) -> None:
    record(value, where, _SESSION, ("unfit",))
    strangers = [name for name in value["starts"] if name not in value["metrics"]]
    if strangers or len(set(value["starts"])) < len(value["starts"]):
        raise Unsound(f"{where}.starts is {quoted(value['starts'])}, not some of the session's metrics, each once")


_GPU: Mapping[str, Check] = {
    "name": words(200),
    "capability": words(10, r"[0-9]+\.[0-9]+"),
    "driver": words(80),
    "memory": number(0, 1e15, whole=True),
    "power_limit": number(0, 1e5),
}
_SESSION: Mapping[str, Check] = {
    "date": date,
    "commit": words(LONGEST["commit"]),
    "dirty": one_of(True, False, None),
    "reason": words(LONGEST["reason"]),
    "measurement": number(1, 1e6, whole=True),
    "gpu": lambda value, where: record(value, where, _GPU, tuple(set(_GPU) - {"name"})),
    "libraries": named(words(80), 40),
    "run": words(12, r"[0-9a-f]{12}"),
    "starts": listed(one_of(*METRICS), 0, len(METRICS)),
    "metrics": _metrics,
    "unfit": words(LONGEST["unfit"]),
}
_BASELINE: Mapping[str, Check] = {
    "schema": one_of(SCHEMA),
    "case": words(200, NAME),
    "case_hash": words(64, r"[0-9A-Za-z_]+"),
    "gpu": words(64, NAME),
    "sessions": listed(_stored_session, 1, MAX_SESSIONS),
    "digest": words(64, r"[0-9a-f]{64}"),
}
