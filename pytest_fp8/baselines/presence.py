"""Baselines that a session on a declared GPU had no use for, or gated on although they were taken another way."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_fp8.baselines.check import measured_otherwise, unused
from pytest_fp8.baselines.record import MEASUREMENT
from pytest_fp8.baselines.source import Source
from pytest_fp8.baselines.store import measuring, parse_text
from pytest_fp8.baselines.strict import Unsound
from pytest_fp8.ci import ci_variable
from pytest_fp8.errors import Fp8Error

if TYPE_CHECKING:
    from pytest_fp8.report.ledger import Ledger


@dataclass
class Presence:
    """Lines for the closing summary; ``problems`` fail the session."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def presence(ledger: Ledger, source: Source, folder: Source, gpu: str) -> Presence:
    """What to say of the baselines of ``gpu`` after a session that read them from ``source``; ``folder``: those of the
    checkout, which a person can prune. Orphaned ones fail it in continuous integration, where nobody reads notes."""
    found = Presence()
    if not ledger.partial:
        asked = [name for name, entry in ledger.entries.items() if entry.decisions]
        here = [path.stem for path in folder.names() if path.parts[:-1] == (gpu,)]
        orphaned, unexercised = unused(here, ledger.collected, asked)
        (found.problems if ci_variable(os.environ) else found.notes).extend(orphaned)
        found.notes += unexercised
    otherwise = _measured_otherwise(ledger, source, gpu)
    if otherwise:
        found.notes.append(
            f"{len(otherwise)} baseline(s) were gated on although their figures were taken another way than today "
            f"(measurement {MEASUREMENT}): {', '.join(otherwise)}\n"
            f'  next: {measuring(gpu, *otherwise)}--fp8-reason "measured as today"'
        )
    return found


def _measured_otherwise(ledger: Ledger, source: Source, gpu: str) -> list[str]:
    asked = {name for name, entry in ledger.entries.items() if entry.gpu == gpu}
    found = []
    for path in source.names():
        if path.parts[:-1] == (gpu,) and path.stem in asked:
            # Where the file cannot be read, the tests of its case have failed with it.
            with contextlib.suppress(Fp8Error, Unsound):
                if measured_otherwise(parse_text(source.text(path) or "", str(path))):
                    found.append(path.stem)
    return found
