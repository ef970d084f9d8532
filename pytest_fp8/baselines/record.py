"""A baseline: the sessions in which a case was measured on one kind of GPU, as records, to JSON and back. Strict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pytest_fp8.baselines.metrics import METRICS, check_agreement
from pytest_fp8.baselines.strict import NAME, Unsound, between, date, named, printable, quoted, sized, words
from pytest_fp8.plain import MAY_LACK, from_plain, plain_value, to_plain

SCHEMA = 3
# 2: a step no longer waits for the GPU.
# 3: arms whose step time drifts within a turn are timed in longer turns; the first 1.5 s of each are dropped.
# 4: busy times of several GPUs leave out waits for late hosts, and casts beside other kernels.
MEASUREMENT = 4
"""How stored figures are taken. Raised, with a line above, by a change that moves one. Sessions of an older number are
still gated on; the session, ``check`` and ``show`` name them."""
MAX_SESSIONS = 8
"""A file keeps so many; a further one takes the place of the oldest."""
LONGEST = {"commit": 80, "reason": 500}
"""Characters."""


@dataclass(frozen=True)
class _Gpu:
    """The fields of :attr:`StoredSession.gpu`."""

    name: Annotated[str, words(200)]
    capability: Annotated[str, words(10, r"[0-9]+\.[0-9]+")] = field(default="", metadata=MAY_LACK)
    driver: Annotated[str, words(80)] = field(default="", metadata=MAY_LACK)
    memory: Annotated[int, between(0, 1e15)] = field(default=0, metadata=MAY_LACK)
    power_limit: Annotated[float, between(0, 1e5)] = field(default=0.0, metadata=MAY_LACK)


def _gpu(value: Mapping[str, Any], where: str) -> None:
    from_plain(_Gpu, value, where)


def _metrics(value: Mapping[str, Any], where: str) -> None:
    if unknown := [quoted(name) for name in value if name not in METRICS]:
        raise Unsound(f"{where} has no field {unknown[0]}")
    for name, values in value.items():
        plain_value(METRICS[name].values, values, f"{where}.{name}")
    check_agreement(value, where)


@dataclass(frozen=True)
class StoredSession:
    """What one session measured, and where it comes from. It never changes once it is stored."""

    date: Annotated[str, date]
    commit: Annotated[str, words(LONGEST["commit"])]
    dirty: bool | None
    """Whether files of the checkout were changed; ``None``: not known."""
    reason: Annotated[str, words(LONGEST["reason"])]
    gpu: Annotated[Mapping[str, Any], _gpu]
    libraries: Annotated[Mapping[str, Annotated[str, words(80)]], sized(0, 40), named]
    run: Annotated[str, words(12, r"[0-9a-f]{12}")]
    """Random digits, the same for all cases of one session: sessions of one day and commit are told apart by it."""
    metrics: Annotated[Mapping[str, Sequence[Any]], sized(1, len(METRICS)), _metrics]
    """Raw values of what this session measured itself: one per seed or process, or one list of blocks per process."""
    measurement: Annotated[int, between(1, 1e6)] = MEASUREMENT
    host_bound: bool = False
    """Whether the host set an arm's pace, in it or in one before it: busy time then says more of FP8 than step time."""
    starts: tuple[str, ...] = ()
    """The metrics of which a new level begins here: they moved by more than noise."""

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = to_plain(self)
        return content

    @property
    def origin(self) -> str:
        return f"{self.date}, commit {self.commit or 'unknown'}"


def _starts(session: StoredSession, where: str) -> None:
    if not set(session.starts) <= set(session.metrics) or len(set(session.starts)) < len(session.starts):
        raise Unsound(f"{where}.starts is {quoted(session.starts)}, not some of the session's metrics, each once")


@dataclass(frozen=True)
class Baseline:
    """What a case once measured on one kind of GPU: its sessions, the oldest first."""

    case: Annotated[str, words(200, NAME)]
    case_hash: Annotated[str, words(64, r"[0-9A-Za-z_]+")]
    gpu: Annotated[str, words(64, NAME)]
    sessions: Annotated[tuple[Annotated[StoredSession, _starts], ...], sized(1, MAX_SESSIONS)] = ()

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


def session_of(
    origin: Mapping[str, Any], metrics: Mapping[str, Sequence[Any]], host_bound: bool = False
) -> StoredSession:
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
        host_bound=host_bound,
    )


class EditedByHand(Unsound):
    """The digest in a file is not that of its content."""


@dataclass(frozen=True)
class _File(Baseline):
    schema: Annotated[int, between(SCHEMA, SCHEMA)] = SCHEMA
    digest: Annotated[str, words(64, r"[0-9a-f]{64}")] = ""


def parse_baseline(data: Any) -> Baseline:
    """A baseline from parsed JSON of schema 3. Raises :class:`Unsound`, which names the field."""
    found = from_plain(_File, data, "the baseline")
    if found.digest != digest(data):
        raise EditedByHand("digest is not that of the content")
    return Baseline(found.case, found.case_hash, found.gpu, found.sessions)
