"""Stored baselines: one JSON file per case and GPU, in a folder or in the folder as it was at a git revision."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path

from pytest_fp8.baselines.atomic import write_atomically
from pytest_fp8.baselines.record import SCHEMA, Baseline, from_text, to_text
from pytest_fp8.case import OWN
from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError, refuse_unknown
from pytest_fp8.git import GitError, agrees, commit_named, committed
from pytest_fp8.plain import PlainDataError
from pytest_fp8.stats.components import Components, History, components_of

Files = Mapping[Path, Baseline | BaselineError]
"""``<gpu>/<case>.json`` below the folder -> the baseline, or why it cannot be read."""


class Folder:
    """Baselines by their path ``<gpu>/<case>.json`` below a folder: in the working tree, or as they were at a git
    ``revision``, of which everything is read at the first question. Raises :class:`BaselineError` where the revision,
    or the folder in it, does not exist."""

    def __init__(self, folder: Path, revision: str = "") -> None:
        self.folder, self.revision = folder, revision

    def label(self, name: Path) -> str:
        """The file as a message calls it."""
        return f"{self.revision}:{self.folder.name}/{name}" if self.revision else str(self.folder / name)

    def names(self) -> list[Path]:
        """All baselines, sorted: notes (``_*.json``) and hidden files are none."""
        every = self._at_revision if self.revision else self.folder.glob("*/*.json")
        names = (name if self.revision else name.relative_to(self.folder) for name in every)
        return sorted(x for x in names if len(x.parts) == 2 and x.suffix == ".json" and x.name[0] not in "_.")

    def read(self, name: Path) -> Baseline | None:
        """The baseline in a file; ``None`` where there is none. Raises :class:`BaselineError` for one that is corrupt,
        of another schema, or of another GPU or case than its path says."""
        path = self.label(name)
        try:
            data = self._at_revision.get(name) if self.revision else (self.folder / name).read_bytes()
            found = from_text(data) if data is not None else None
            if found is not None and (found.gpu, found.case) != (name.parent.name, name.stem):
                raise PlainDataError(f"it is the baseline of {found.gpu}/{found.case}: the file was renamed or copied")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise BaselineError(
                B.UNREADABLE,
                f"{path} is not a readable baseline",
                expected=f"schema {SCHEMA} of pytest-fp8, in JSON, as it was measured",
                seen=str(error),
                cause="the file was cut off, edited by hand, copied or merged; another version of pytest-fp8 wrote it; "
                "or this user may not read it",
                next_step=f"git diff -- {path} shows an edit; restore it (git checkout -- {shlex.quote(path)}), or "
                'delete it and measure again: --fp8-update="..."',
            ) from error
        return found

    def all(self, gpu: str = "") -> Files:
        """All baselines, or those of a GPU."""
        found: dict[Path, Baseline | BaselineError] = {}
        for name in self.names():
            if gpu in ("", name.parts[0]):
                try:
                    stored = self.read(name)
                except BaselineError as error:
                    found[name] = error
                else:
                    found |= {name: stored} if stored is not None else {}
        return found

    @cached_property
    def above(self) -> Path:
        """The folder; where it is gone, the first one above that is there: git removes those that it leaves empty."""
        folder = self.folder.absolute()
        return next(one for one in (folder, *folder.parents) if one.is_dir())

    @cached_property
    def _at_revision(self) -> Mapping[Path, bytes]:
        below = self.folder.absolute().relative_to(self.above)
        try:
            found = committed(self.above, commit_named(self.above, self.revision), f"./{below.as_posix()}")
        except GitError as error:
            raise BaselineError(
                B.NO_REVISION,
                f"baselines of {self.folder} at git revision {self.revision!r} cannot be read",
                expected="a folder in a git repository, and a commit, branch or tag of it that has baselines",
                seen=str(error),
                # What git itself says to do has its cause in what it says.
                cause="a revision from before the folder, or of another repository",
                next_step=f"git log --oneline -- {self.folder}",
            ) from error
        return {Path(name).relative_to(below): data for name, data in found.items()}


@lru_cache(maxsize=4)
def source_of(folder: Path, revision: str = "") -> Folder:
    """Where this session's baselines are: the folder as it is at the commit ``revision`` where its repository has that
    commit and the commit has baselines there; else the folder itself. Read once. Raises :class:`BaselineError`."""
    there = Folder(folder, revision)
    known = bool(revision) and agrees(there.above, "cat-file", "-e", f"{revision}^{{commit}}")
    return there if known and there.names() else Folder(folder)


def read_folder(folder: Path) -> Files:
    """All baselines below a folder. Raises :class:`BaselineError` where it is none."""
    if folder.is_dir():
        return Folder(folder).all()
    raise BaselineError(
        B.NOTHING_THERE,
        f"{folder.absolute()} is no folder of baselines",
        expected="a folder like baselines/, with <gpu>/<case>.json in it",
        seen="a file" if folder.exists() else "nothing there",
        next_step="name it with --dir",
    )


# -- one case ---------------------------------------------------------------------------------------------------------


def baseline_path(folder: Path, gpu: str, case: str) -> Path:
    """``<folder>/<gpu>/<case>.json``"""
    return folder / gpu / f"{case}.json"


def read_baseline(source: Folder, gpu: str, case: str, case_hash: str) -> Baseline | None:
    """The baseline of a case, or ``None`` where there is none. Raises :class:`BaselineError` for a file that cannot be
    read, and for one of a case whose definition has changed: it is never compared with."""
    name = baseline_path(Path(), gpu, case)
    found = source.read(name)
    if found is not None and found.case_hash != case_hash:
        raise BaselineError(
            B.REDEFINED,
            f"{source.label(name)} was measured for another definition of case {case!r}",
            expected=f"case hash {case_hash}",
            seen=found.case_hash,
            cause="the model, its batch, one of the workload's functions, its version=, the recipe or the way of "
            "measuring changed since; or a function draws sizes at random, so that each run has another hash"
            if case.startswith(OWN)
            else "the case's model, recipe, sizes, data or way of measuring changed since",
            next_step=f'measure it again: {measuring(gpu, case)}"the case changed: ..."',
        )
    return found


def earlier_baseline(source: Folder, gpu: str, case: str, case_hash: str) -> tuple[Baseline | None, str]:
    """The stored baseline that a new one is compared with; or ``None``, and why a stored one is not. Raises
    :class:`BaselineError` for a file that cannot be read: its history is not to be lost."""
    try:
        return read_baseline(source, gpu, case, case_hash), ""
    except BaselineError as error:
        if error.code is not B.REDEFINED:
            raise
        return None, f"the earlier file cannot be compared with: {error.headline}"


def held_against(source: Folder, gpu: str, case: str, case_hash: str, update: bool) -> tuple[Baseline | None, bool]:
    """The baseline that a session's figures are held against, which those of an ``update`` are not; and whether what is
    stored is host-bound. Raises :class:`BaselineError` as :func:`read_baseline` does; in an update, and at a revision,
    as :func:`earlier_baseline` does: base cannot have what a change defines anew."""
    anew = update or bool(source.revision)
    read = earlier_baseline(source, gpu, case, case_hash)[0] if anew else read_baseline(source, gpu, case, case_hash)
    return None if update else read, read is not None and read.host_bound


def load_baseline(path: Path) -> Baseline:
    """The baseline in ``<folder>/<gpu>/<case>.json``. Raises ``FileNotFoundError`` and :class:`BaselineError`."""
    found = Folder(path.parents[1]).read(path.relative_to(path.parents[1]))
    if found is None:
        raise FileNotFoundError(path)
    return found


def write_baseline(folder: Path, baseline: Baseline) -> Path:
    """Write atomically: a reader sees the old file or the new one, and after any failure the old one is still there."""
    path, text = baseline_path(folder, baseline.gpu, baseline.case), to_text(baseline)
    from_text(text)
    write_atomically(path, text)
    return path


def measuring(gpu: str, case: str) -> str:
    """The command that measures a case anew, but for its reason in quotes. The suites have none of a user's own.
    Emulated cases run where no GPU is declared: ``emulated`` is a folder and no GPU's name."""
    run = "pytest" if case.startswith(OWN) else "pytest-fp8 suites"
    option = "" if gpu == "emulated" else f"--fp8-gpu={gpu} "
    return f"{run} -k {case} {option}--fp8-update="


# -- several ----------------------------------------------------------------------------------------------------------


def readable(files: Files) -> dict[tuple[str, str], Baseline]:
    """(GPU, case) -> baseline. Raises the :class:`BaselineError` of the first file that cannot be read."""
    for stored in files.values():
        if isinstance(stored, BaselineError):
            raise stored
    return {(x.gpu, x.case): x for x in files.values() if isinstance(x, Baseline)}


def chosen(files: Files, gpu: str = "", case: str = "") -> Files:
    """Those of a GPU, and of a case or ``<gpu>/<case>`` as summaries print it. Raises :class:`SettingsError` with the
    name that was probably meant where nothing is."""

    def name(path: Path) -> str:
        return path.with_suffix("").as_posix() if "/" in case else path.stem

    found = {p: stored for p, stored in files.items() if gpu in ("", p.parts[0]) and case in ("", name(p))}
    if not found and (gpu or case):
        known = sorted({name(path) if case else path.parts[0] for path in files})
        here = f"no baseline of case {case!r}" if case else f"--gpu {gpu}: nothing is stored of such a GPU"
        refuse_unknown(B.UNKNOWN_NAME, here, case or gpu, known, "pytest-fp8 baselines list")
    return found


def estimated(stored: Iterable[Baseline | BaselineError]) -> Components:
    """The variance components of these baselines of one GPU. All cases of one run name its session alike. A file that
    cannot be read is left out: the tests of its case, and ``check``, fail with it."""
    found: dict[str, list[History]] = {"speedup": [], "busy_speedup": []}
    for baseline in stored:
        if isinstance(baseline, Baseline) and (metric := baseline.gated):
            sessions = baseline.measured_in(metric)
            found[metric].append({f"{s.date} {s.commit} {s.run}": s.metrics[metric] for s in sessions})
    return components_of(found["speedup"], found["busy_speedup"])


def components_in(source: Folder, gpu: str) -> Components:
    """The components of a GPU's stored baselines."""
    return estimated(source.all(gpu).values())
