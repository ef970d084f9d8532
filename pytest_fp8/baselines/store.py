"""Stored baselines: one JSON file per case and GPU, raw values per process or seed, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_fp8.case import OWN
from pytest_fp8.descriptors import write_all
from pytest_fp8.errors import BaselineError

SCHEMA = 1
LEFTOVER = ".tmp"
"""How the hidden file ends that is written before the rename."""
_METRIC_FIELDS = {"unit", "direction", "tolerance", "values"}


@dataclass(frozen=True)
class Baseline:
    """What a case once measured on one kind of GPU.

    ``metrics``: name -> {unit, direction, tolerance, values}; the values are raw, one per process or seed.
    """

    case: str
    case_hash: str
    gpu: str
    metrics: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def values(self, metric: str) -> list[Any]:
        """The raw values of a metric; empty where the baseline does not have it."""
        return list(self.metrics.get(metric, {}).get("values", []))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "case": self.case,
            "case_hash": self.case_hash,
            "gpu": self.gpu,
            "metrics": dict(self.metrics),
            "provenance": dict(self.provenance),
        }


def baseline_path(folder: Path, gpu: str, case: str) -> Path:
    """``<folder>/<gpu>/<case>.json``; a name that would leave the folder is refused."""
    for part in (gpu, case):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", part):
            raise BaselineError(
                f"{part!r} cannot name a baseline", expected="letters, digits, '.', '_' and '-'", seen=part
            )
    return folder / gpu / f"{case}.json"


def read_baseline(folder: Path, gpu: str, case: str, case_hash: str) -> Baseline | None:
    """The baseline of a case, or ``None`` where there is none.

    Raises :class:`BaselineError` naming the file for one that is corrupt, of another schema, of another GPU or case, or
    of a case whose definition has changed: none of these is ever compared with.
    """
    path = baseline_path(folder, gpu, case)
    try:
        found = load_baseline(path)
    except FileNotFoundError:
        return None
    if found.gpu != gpu:
        raise BaselineError(
            f"{path} is a baseline of another GPU",
            expected=gpu,
            seen=found.gpu,
            cause="the file was copied between GPU folders",
            next_step=f"delete it, then measure on a {gpu}: pytest suites --fp8-gpu={gpu} "
            '--fp8-update-baselines --fp8-reason "..."',
        )
    if found.case != case:
        raise BaselineError(
            f"{path} is a baseline of another case",
            expected=case,
            seen=found.case,
            cause="the file was renamed",
            next_step="restore its name",
        )
    if found.case_hash != case_hash:
        own = case.startswith(OWN)
        raise BaselineError(
            f"{path} was measured for another definition of case {case!r}",
            expected=f"case hash {case_hash}",
            seen=found.case_hash,
            cause="the model, its batch, one of the workload's functions, its version=, the recipe or the way of "
            "measuring changed since; or a function draws sizes at random, so that each run has another hash"
            if own
            else "the case's model, recipe, sizes, data or way of measuring changed since",
            next_step=f"measure it again: pytest {'' if own else 'suites '}-k {case} --fp8-gpu={gpu} "
            '--fp8-update-baselines --fp8-reason "the case changed: ..."',
        )
    return found


def load_baseline(path: Path) -> Baseline:
    """The baseline in a file, whatever its name and folder say. Raises ``FileNotFoundError`` or
    :class:`BaselineError` naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, f"{type(error).__name__}: {error}") from error
    return parse_text(text, path)


def parse_text(text: str, path: Path) -> Baseline:
    """A baseline from the text of a file called ``path``."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _broken(path, str(error)) from error
    return parse_baseline(data, path)


def parse_baseline(data: Any, path: Path) -> Baseline:
    """A baseline from parsed JSON, every field checked."""
    if not isinstance(data, dict):
        raise _broken(path, f"a JSON {type(data).__name__}, not an object")
    if data.get("schema") != SCHEMA:
        raise BaselineError(
            f"{path} has another schema",
            expected=f"schema {SCHEMA}",
            seen=f"schema {data.get('schema')!r}",
            cause="it was written by another version of pytest-fp8",
            next_step="update pytest-fp8, or measure the case again with --fp8-update-baselines",
        )
    for name in ("case", "case_hash", "gpu"):
        if not isinstance(data.get(name), str):
            raise _broken(path, f"{name!r} is {data.get(name)!r}, not text")
    metrics = data.get("metrics")
    if not isinstance(metrics, dict):
        raise _broken(path, "'metrics' is not an object")
    for name, metric in metrics.items():
        if not isinstance(metric, dict) or not set(metric) >= _METRIC_FIELDS or not isinstance(metric["values"], list):
            raise _broken(path, f"metric {name!r} does not have {', '.join(sorted(_METRIC_FIELDS))}")
        if not metric["values"]:
            raise _broken(path, f"metric {name!r} has no values")
    return Baseline(data["case"], data["case_hash"], data["gpu"], metrics, data.get("provenance", {}))


def write_baseline(folder: Path, baseline: Baseline) -> Path:
    """Write atomically: a reader sees the old file or the new one, and after any failure the old one is still there."""
    path = baseline_path(folder, baseline.gpu, baseline.case)
    parse_baseline(json.loads(json.dumps(baseline.to_json())), path)
    write_atomically(path, json.dumps(baseline.to_json(), indent=1, sort_keys=True) + "\n")
    return path


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` beside ``path``, flush it, rename it, flush the folder. A reader sees the old file or the new one.

    A writer that is killed leaves at most a hidden ``.*.tmp`` beside it, which :func:`sweep` removes. Raises
    :class:`BaselineError` naming the file, and saying which of the two is there.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=LEFTOVER, dir=path.parent)
        try:
            write_all(handle, text.encode())
            os.fsync(handle)
            os.fchmod(handle, 0o644)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise BaselineError(
            f"could not write {path}",
            expected="room and permission to write there",
            seen=f"{type(error).__name__}: {error}",
            cause="the disk is full or the folder is read-only; nothing was changed, the earlier file is whole",
            next_step=f"df -h {path.parent}, then run the update again",
        ) from error
    _flush_folder(path)


def _flush_folder(path: Path) -> None:
    """Make the rename itself survive a power cut. Not every file system can: those say EINVAL or ENOTSUP."""
    try:
        handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return
        raise BaselineError(
            f"{path} was written, and its folder could not be flushed to the disk",
            expected="a disk that takes the rename",
            seen=f"{type(error).__name__}: {error}",
            cause="an I/O error; the new file is in place and whole, and a power cut now could bring the earlier back",
            next_step=f"sync, then git diff -- {path}",
        ) from error


def sweep(folder: Path) -> list[str]:
    """Remove what killed writers left below ``folder``; gives the names. Only for the holder of the update lock."""
    gone = []
    for leftover in sorted(folder.glob(f"*/.*.json.*{LEFTOVER}")):
        with contextlib.suppress(OSError):
            leftover.unlink()
            gone.append(leftover.name)
    return gone


@contextmanager
def updating(folder: Path) -> Iterator[None]:
    """Hold the folder's update lock; raises :class:`BaselineError` at once where another run holds it.

    The lock is the kernel's, on a file that stays: a run that dies gives it back. What killed writers left behind is
    removed on entry.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise BaselineError(
            f"baselines in {folder} cannot be updated",
            expected="a folder that can be written",
            seen=f"{type(error).__name__}: {error}",
            next_step="choose another with --fp8-baseline-dir",
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BaselineError(
                f"another run is updating the baselines in {folder}",
                expected="one update at a time",
                seen=f"{path} is locked",
                cause="a second pytest --fp8-update-baselines on this folder",
                next_step="wait for it to end, then run again",
            ) from error
        sweep(folder)
        yield


def _broken(path: Path, why: str) -> BaselineError:
    return BaselineError(
        f"{path} is not a readable baseline",
        expected=f"schema {SCHEMA} of pytest-fp8, in JSON",
        seen=why,
        cause="the file was cut off, edited by hand or merged with conflict markers",
        next_step=f"git checkout -- {path}, or delete it and measure again with --fp8-update-baselines",
    )
