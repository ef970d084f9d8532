"""Stored baselines: one JSON file per case and GPU, raw values per process or seed, read strictly."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_fp8.baselines.atomic import write_atomically
from pytest_fp8.case import OWN
from pytest_fp8.errors import BaselineError

SCHEMA = 1
FIELDS = ("schema", "case", "case_hash", "gpu", "metrics", "provenance")
METRIC_FIELDS = ("unit", "direction", "tolerance", "values")
PROVENANCE_FIELDS = ("date", "commit", "dirty", "gpu", "libraries", "reason")
OPTIONAL_PROVENANCE = ("kept", "unfit")
"""``kept``: metric -> date and commit of an earlier measurement, where an update kept its values.
``unfit``: why a candidate must not be stored."""


@dataclass(frozen=True)
class Baseline:
    """What a case once measured on one kind of GPU.

    ``metrics``: name -> {unit, direction, tolerance, values}; the values are raw, one per process or seed.
    ``provenance``: :data:`PROVENANCE_FIELDS`, and where they apply :data:`OPTIONAL_PROVENANCE`.
    """

    case: str
    case_hash: str
    gpu: str
    metrics: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, Any]

    def values(self, metric: str) -> list[Any]:
        """The raw values of a metric; empty where the baseline does not have it."""
        return list(self.metrics[metric]["values"]) if metric in self.metrics else []

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
            next_step=f"delete it, then measure on a {gpu}: pytest suites {gpu_option(gpu)}"
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
        raise _redefined(path, found, case_hash)
    return found


def gpu_option(gpu: str) -> str:
    """pytest's option to measure baselines of this folder, with a space behind it. Emulated cases run where no GPU is
    declared: ``emulated`` is a folder and no GPU's name."""
    return "" if gpu == "emulated" else f"--fp8-gpu={gpu} "


def _redefined(path: Path, found: Baseline, case_hash: str) -> BaselineError:
    own = found.case.startswith(OWN)
    return BaselineError(
        f"{path} was measured for another definition of case {found.case!r}",
        expected=f"case hash {case_hash}",
        seen=found.case_hash,
        cause="the model, its batch, one of the workload's functions, its version=, the recipe or the way of measuring "
        "changed since; or a function draws sizes at random, so that each run has another hash"
        if own
        else "the case's model, recipe, sizes, data or way of measuring changed since",
        next_step=f"measure it again: pytest {'' if own else 'suites '}-k {found.case} {gpu_option(found.gpu)}"
        '--fp8-update-baselines --fp8-reason "the case changed: ..."',
    )


def earlier_baseline(folder: Path, gpu: str, case: str, case_hash: str) -> tuple[Baseline | None, str]:
    """The stored baseline that a new one is compared with; or ``None``, and why a stored one cannot be."""
    try:
        return read_baseline(folder, gpu, case, case_hash), ""
    except BaselineError as error:
        return None, f"the earlier file cannot be compared with: {error.headline}"


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
    """A baseline from the text of a file called ``path``. Raises :class:`BaselineError`."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _broken(path, str(error)) from error
    return parse_baseline(data, path)


def parse_baseline(data: Any, path: Path) -> Baseline:
    """A baseline from parsed JSON. A missing or unknown field is an error, and so is one of another type."""
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
    try:
        _has_fields("the baseline", data, FIELDS)
        for name in ("case", "case_hash", "gpu"):
            _is(str, "text", data, name)
        _is(dict, "an object", data, "metrics")
        _is(dict, "an object", data, "provenance")
        for name, metric in data["metrics"].items():
            _check_metric(name, metric)
        _check_provenance(data["provenance"])
    except ValueError as error:
        raise _broken(path, str(error)) from error
    return Baseline(data["case"], data["case_hash"], data["gpu"], data["metrics"], data["provenance"])


def write_baseline(folder: Path, baseline: Baseline) -> Path:
    """Write atomically: a reader sees the old file or the new one, and after any failure the old one is still there."""
    path = baseline_path(folder, baseline.gpu, baseline.case)
    text = json.dumps(baseline.to_json(), indent=1, sort_keys=True) + "\n"
    parse_text(text, path)
    write_atomically(path, text)
    return path


def _check_metric(name: str, metric: Any) -> None:
    if not isinstance(metric, dict):
        raise ValueError(f"metric {name!r} is not an object")
    _has_fields(f"metric {name!r}", metric, METRIC_FIELDS)
    if not isinstance(metric["values"], list) or not metric["values"]:
        raise ValueError(f"metric {name!r} has no values")


def _check_provenance(data: dict[str, Any]) -> None:
    _has_fields("provenance", data, PROVENANCE_FIELDS, OPTIONAL_PROVENANCE)
    for name in ("date", "commit", "reason"):
        _is(str, "text", data, name)
    _is(bool | None, "true, false or null", data, "dirty")
    _is(dict, "an object", data, "gpu")
    _is(dict, "an object", data, "libraries")
    datetime.date.fromisoformat(data["date"])
    if "unfit" in data:
        _is(str, "text", data, "unfit")
    if "kept" in data:
        _is(dict, "an object", data, "kept")
        for metric, origin in data["kept"].items():
            _is(dict, "an object", data["kept"], metric)
            _has_fields(f"kept metric {metric!r}", origin, ("date", "commit"))
            datetime.date.fromisoformat(origin["date"])


def _has_fields(what: str, data: Mapping[str, Any], needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    missing = [name for name in needed if name not in data]
    unknown = [name for name in data if name not in needed + optional]
    if missing or unknown:
        said = [f"lacks {', '.join(missing)}"] if missing else []
        said += [f"has unknown fields: {', '.join(unknown)}"] if unknown else []
        raise ValueError(f"{what} {' and '.join(said)}")


def _is(kind: Any, described: str, data: Mapping[str, Any], name: str) -> None:
    if not isinstance(data[name], kind):
        raise ValueError(f"{name!r} is {data[name]!r}, not {described}")


def _broken(path: Path, why: str) -> BaselineError:
    return BaselineError(
        f"{path} is not a readable baseline",
        expected=f"schema {SCHEMA} of pytest-fp8, in JSON",
        seen=why,
        cause="the file was cut off, edited by hand or merged with conflict markers",
        next_step=f"restore it (git checkout -- {path}), or delete it and measure again: "
        '--fp8-update-baselines --fp8-reason "..."',
    )
