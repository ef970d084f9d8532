"""Candidates that a person has reviewed become baselines: the same rules as an update, without measuring again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_fp8.baselines.revision import Revision, revise, revised
from pytest_fp8.baselines.shelf import read_folder, readable
from pytest_fp8.baselines.store import Baseline, baseline_path, load_baseline, updating, write_baseline
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
    """Store the candidates of ``cases`` (all by default) below ``folder`` where they moved by more than noise.

    One that its run called unfit is refused. Raises :class:`BaselineError` for an unreadable candidate, and
    :class:`SettingsError` without a reason or where a named case has no candidate.
    """
    if not reason.strip():
        raise SettingsError("a promotion needs a reason", expected='--reason "why"', seen="an empty one")
    found = readable(read_folder(candidates))
    missing = sorted(set(cases) - {case for _, case in found})
    if missing:
        raise SettingsError(
            f"no candidate of case {missing[0]!r} in {candidates}",
            expected=", ".join(sorted(case for _, case in found)) or "a folder of candidates",
            seen=missing[0],
            next_step=f"pytest-fp8 baselines list --dir {candidates}",
        )
    done = Promotion()
    with updating(folder):
        for (kind, case), candidate in sorted(found.items()):
            if (cases and case not in cases) or gpu not in ("", kind):
                continue
            unfit = candidate.provenance.get("unfit")
            if unfit:
                done.refused.append(f"candidate {kind}/{case} was not stored: {unfit}")
                continue
            new = replace(candidate, provenance={**candidate.provenance, "reason": reason.strip()})
            old, whole = _stored(folder, kind, case)
            revision = revise(old, new, whole)
            done.revisions.append(revision)
            chosen = revised(old, new, revision)
            if chosen is not None:
                done.written.append(write_baseline(folder, chosen))
    return done


def _stored(folder: Path, gpu: str, case: str) -> tuple[Baseline | None, str]:
    try:
        return load_baseline(baseline_path(folder, gpu, case)), ""
    except FileNotFoundError:
        return None, ""
    except BaselineError as error:
        return None, f"the earlier file cannot be compared with: {error.headline}"
