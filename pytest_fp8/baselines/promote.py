"""Candidates that a person has reviewed become baselines: the same rules as an update, without measuring again."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_fp8.baselines.atomic import updating
from pytest_fp8.baselines.folder import named, read_folder, readable
from pytest_fp8.baselines.history import appended, why_not_appended
from pytest_fp8.baselines.record import LONGEST
from pytest_fp8.baselines.review import Revision, revise
from pytest_fp8.baselines.source import Folder
from pytest_fp8.baselines.store import earlier_baseline, write_baseline
from pytest_fp8.baselines.strict import printable
from pytest_fp8.baselines.update import too_few
from pytest_fp8.baselines.variance import read_components
from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError, SettingsError


@dataclass
class Promotion:
    """What was done with each candidate."""

    revisions: list[Revision] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def promote_candidates(
    candidates: Path, folder: Path, reason: str, cases: Collection[str] = (), gpu: str = ""
) -> Promotion:
    """Append the newest session of the candidates of ``cases`` (all by default) to the baselines below ``folder``.

    A candidate is refused where an update would have refused what its session measured. Raises :class:`BaselineError`
    for an unreadable candidate among them, and :class:`SettingsError` without a reason or where a named case has none.
    """
    if not reason.strip():
        raise SettingsError(B.USAGE, "a promotion needs a reason", expected='--reason "why"', seen="an empty one")
    found = readable(read_folder(candidates), wanted=cases)
    listed = f"pytest-fp8 baselines list --dir {shlex.quote(str(candidates))}"
    wanted = {one for case in cases for one in named(case, list(found), gpu, "candidate", listed)}
    done = Promotion()
    with updating(folder):
        for (kind, case), candidate in sorted(found.items()):
            if (cases and (kind, case) not in wanted) or gpu not in ("", kind):
                continue
            session = replace(candidate.newest, reason=printable(reason, LONGEST["reason"]))
            new = replace(candidate, sessions=(session,))
            try:
                old, why_none = earlier_baseline(folder, kind, case, new.case_hash)
                why = session.unfit or too_few(session.metrics) or why_not_appended(old, session)
                if not why:
                    revision = revise(old, new, why_none, components=read_components(Folder(folder), kind))
                    done.written.append(write_baseline(folder, appended(old, new, revision.starts())))
                    done.revisions.append(revision)
            except BaselineError as error:
                # Those before it are stored, and are told.
                why = error.message
            if why:
                done.refused.append(f"candidate {kind}/{case} was not stored: {why}")
    return done
