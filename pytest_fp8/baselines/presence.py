"""Baselines that a session on a declared GPU lacked, had no use for, or found measured another way than today."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_fp8.baselines.check import measured_otherwise, unused
from pytest_fp8.baselines.metrics import REQUIRED
from pytest_fp8.baselines.source import Source
from pytest_fp8.baselines.store import gpu_option, parse_text
from pytest_fp8.baselines.strict import Unsound
from pytest_fp8.errors import Fp8Error
from pytest_fp8.measurement import MEASUREMENT
from pytest_fp8.options import ci_variable

if TYPE_CHECKING:
    from pytest_fp8.baselines.record import Baseline
    from pytest_fp8.report.ledger import Ledger

GATED = ("speedup", "memory")
"""The questions that are held against a baseline and say nothing without one."""


@dataclass
class Presence:
    """Lines for the closing summary; ``problems`` fail the session."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def presence(ledger: Ledger, source: Source, folder: Source, gpu: str, revision: str) -> Presence:
    """What to say of the baselines of ``gpu`` after a session that read them from ``source``; ``folder``: those of the
    checkout, which a person can prune.

    Missing and orphaned ones fail it in continuous integration, where nobody reads notes; missing ones also where the
    baselines of a ``revision`` were asked for.
    """
    stored = {path.stem: path for path in source.names() if path.parts[:-1] == (gpu,)}
    in_ci = bool(ci_variable(os.environ))
    found = Presence()
    held: dict[str, Baseline] = {}
    for name, entry in ledger.entries.items():
        if entry.gpu == gpu and name in stored:
            # Where the file cannot be read, the tests of this case have failed with it.
            with contextlib.suppress(Fp8Error, Unsound):
                held[name] = parse_text(source.text(stored[name]) or "", name)
    missing = missing_baselines(ledger, held, stored, gpu)
    if missing:
        at = f" at git revision {revision}" if revision else ""
        (found.problems if in_ci or revision else found.notes).append(
            f"{len(missing)} baseline(s) are missing{at}, so these cases were gated on nothing: {', '.join(missing)}\n"
            f"  next: {measure([name.partition(' ')[0] for name in missing], gpu)}"
        )
    if not ledger.partial:
        asked = [name for name, entry in ledger.entries.items() if entry.decisions]
        here = [path.stem for path in folder.names() if path.parts[:-1] == (gpu,)]
        orphaned, rest = unused(here, ledger.collected, asked)
        (found.problems if in_ci else found.notes).extend(orphaned)
        found.notes += rest
    otherwise = sorted(name for name, baseline in held.items() if measured_otherwise(baseline))
    if otherwise:
        found.notes.append(
            f"{len(otherwise)} baseline(s) were gated on although their figures were taken another way than today "
            f"(measurement {MEASUREMENT}): {', '.join(otherwise)}\n  next: {measure(otherwise, gpu)}"
        )
    return found


def missing_baselines(ledger: Ledger, held: dict[str, Baseline], stored: Collection[str], gpu: str) -> list[str]:
    """The cases that were asked what only a baseline can answer and have none, or one without the metric."""
    missing = []
    for name, entry in ledger.entries.items():
        if entry.gpu != gpu or not entry.metrics or (name in stored and name not in held):
            continue
        wanted = [metric for question in GATED if question in entry.decisions for metric in REQUIRED[question]]
        lacks = [metric for metric in wanted if name not in held or metric not in held[name].metrics]
        if lacks:
            missing.append(name if name not in held else f"{name} (has no {', '.join(lacks)})")
    return missing


def measure(cases: Sequence[str], gpu: str) -> str:
    """The command that measures these cases."""
    chosen = cases[0] if len(cases) == 1 else f'"{" or ".join(cases)}"'
    return (
        f"on a machine of your own: pytest suites -k {chosen} {gpu_option(gpu)}--fp8-update-baselines "
        '--fp8-reason "...", and commit the files'
    )
