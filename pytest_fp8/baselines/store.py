"""Stored baselines: one JSON file per case and GPU, in a folder or in the folder as it was at a git revision."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path

from pytest_fp8.baselines.atomic import write_atomically
from pytest_fp8.baselines.record import SCHEMA, Baseline, parse_baseline
from pytest_fp8.baselines.strict import Unsound, decoded, parse, read_regular
from pytest_fp8.case import OWN
from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError, refuse_unknown
from pytest_fp8.git import GitError, agrees, commit_named, committed
from pytest_fp8.gpu import NAMES
from pytest_fp8.stats.components import Components, History, components_of

LIST = "pytest-fp8 baselines list"
Files = Mapping[Path, Baseline | BaselineError]
"""Path below the folder -> the baseline, or why it cannot be read."""


class Folder:
    """Files by their path below the folder of baselines, in the working tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def label(self, name: Path) -> str:
        """The file as a message calls it."""
        return str(self.folder / name)

    def text(self, name: Path) -> str | None:
        """What is in the file; ``None`` where there is none. Raises :class:`Unsound`."""
        try:
            return read_regular(self.folder / name)
        except FileNotFoundError:
            return None

    def names(self) -> list[Path]:
        """All ``*.json`` below the folder, without those whose name begins with ``_`` or ``.``, sorted."""
        return sorted(path.relative_to(self.folder) for path in self.folder.rglob("*.json") if is_baseline(path.name))


Source = Folder
"""Where baselines are read from: either class."""


class Revision(Folder):
    """A folder as it was at a git revision: a commit, branch or tag. Everything is read at the first question.

    Raises :class:`BaselineError` where the revision or the folder in it does not exist.
    """

    def __init__(self, folder: Path, revision: str) -> None:
        super().__init__(folder)
        self.revision = revision

    def label(self, name: Path) -> str:
        return f"{self.revision}:{self.folder.name}/{name}"

    def text(self, name: Path) -> str | None:
        return decoded(self._files[name]) if name in self._files else None

    def names(self) -> list[Path]:
        return sorted(name for name in self._files if is_baseline(name.name))

    @cached_property
    def above(self) -> Path:
        """The folder; where it is gone, the first one above that is there: git removes those that it leaves empty."""
        folder = self.folder.absolute()
        return next(one for one in (folder, *folder.parents) if one.is_dir())

    @cached_property
    def _files(self) -> Mapping[Path, bytes]:
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
def source_of(folder: Path, revision: str = "") -> Source:
    """Where this session's baselines are: the folder as it is at the commit ``revision`` where its repository has that
    commit and the commit has baselines there; else the folder itself. Read once. Raises :class:`BaselineError`."""
    there = Revision(folder, revision)
    known = bool(revision) and agrees(there.above, "cat-file", "-e", f"{revision}^{{commit}}")
    return there if known and there.names() else Folder(folder)


def is_baseline(name: str) -> bool:
    """Whether a file of this name holds a baseline: those of notes (``_``) and hidden ones do not."""
    return name.endswith(".json") and not name.startswith(("_", "."))


# -- one file -----------------------------------------------------------------------------------------------------


def baseline_path(folder: Path, gpu: str, case: str) -> Path:
    """``<folder>/<gpu>/<case>.json``"""
    return folder / gpu / f"{case}.json"


def load(source: Source, name: Path) -> Baseline | None:
    """The baseline in a file of ``source``; ``None`` where there is none. A missing or unknown field is an error, and
    so is a value of another type or outside its range, or a digest that is not that of the content. Raises
    :class:`BaselineError`, which names file and field."""
    path = source.label(name)
    try:
        text = source.text(name)
        return parse_baseline(parse(text)) if text is not None else None
    except Unsound as error:
        raise BaselineError(
            B.UNREADABLE,
            f"{path} is not a readable baseline",
            expected=f"schema {SCHEMA} of pytest-fp8, in JSON, as it was measured",
            seen=str(error),
            cause="the file was cut off, edited by hand or merged; another version of pytest-fp8 wrote it; or this "
            "user may not read it",
            next_step=f"git diff -- {path} shows an edit; restore it (git checkout -- {shlex.quote(path)}), or delete "
            'it and measure again: --fp8-update="..."',
        ) from error


def load_baseline(path: Path) -> Baseline:
    """The baseline in a file, whatever its name and folder say. Raises ``FileNotFoundError`` or
    :class:`BaselineError` naming the file."""
    found = load(Folder(path.parent), Path(path.name))
    if found is None:
        raise FileNotFoundError(path)
    return found


def read_baseline(source: Path | Source, gpu: str, case: str, case_hash: str) -> Baseline | None:
    """The baseline of a case in a folder or at a git revision, or ``None`` where there is none.

    Raises :class:`BaselineError` naming the file for one that is corrupt, of another schema, of another GPU or case, or
    of a case whose definition has changed: none of these is ever compared with.
    """
    source = Folder(source) if isinstance(source, Path) else source
    name = baseline_path(Path(), gpu, case)
    found = load(source, name)
    if found is None:
        return None
    if fault := misplaced(name, found, source.label(name)):
        raise fault
    if found.case_hash != case_hash:
        own = case.startswith(OWN)
        raise Superseded(
            B.REDEFINED,
            f"{source.label(name)} was measured for another definition of case {case!r}",
            expected=f"case hash {case_hash}",
            seen=found.case_hash,
            cause="the model, its batch, one of the workload's functions, its version=, the recipe or the way of "
            "measuring changed since; or a function draws sizes at random, so that each run has another hash"
            if own
            else "the case's model, recipe, sizes, data or way of measuring changed since",
            next_step=f'measure it again: {measuring(gpu, case)}"the case changed: ..."',
        )
    return found


def misplaced(path: Path, stored: Baseline, label: str = "") -> BaselineError | None:
    """The error of a file in a folder that lies in another place than its case's."""
    home = baseline_path(Path(), stored.gpu, stored.case)
    if len(path.parts) == 1 or path == home:
        return None
    return BaselineError(
        B.MISPLACED,
        f"{label or path} holds the baseline of {stored.gpu}/{stored.case}",
        expected=str(home),
        seen=str(path),
        cause="the file was renamed or copied",
        next_step=f'move it back, or delete it and measure again: {measuring(path.parts[0], path.stem)}"..."',
    )


class Superseded(BaselineError):
    """What is stored is of another definition of the case, and measuring again takes its place."""


def earlier_baseline(source: Path | Source, gpu: str, case: str, case_hash: str) -> tuple[Baseline | None, str]:
    """The stored baseline that a new one is compared with; or ``None``, and why a stored one is not. Raises
    :class:`BaselineError` for a file that cannot be read or is in the wrong place: its history is not to be lost."""
    try:
        return read_baseline(source, gpu, case, case_hash), ""
    except Superseded as error:
        return None, f"the earlier file cannot be compared with: {error.headline}"


def held_against(source: Source, gpu: str, case: str, case_hash: str, update: bool) -> tuple[Baseline | None, bool]:
    """The baseline that a session's figures are held against, which those of an ``update`` are not; and whether what is
    stored is host-bound. Raises :class:`BaselineError` as :func:`read_baseline` does, in an update as
    :func:`earlier_baseline` does."""
    read = earlier_baseline(source, gpu, case, case_hash)[0] if update else read_baseline(source, gpu, case, case_hash)
    return None if update else read, read is not None and read.host_bound


def write_baseline(folder: Path, baseline: Baseline) -> Path:
    """Write atomically: a reader sees the old file or the new one, and after any failure the old one is still there."""
    path = baseline_path(folder, baseline.gpu, baseline.case)
    text = json.dumps(baseline.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"
    parse_baseline(parse(text))
    write_atomically(path, text)
    return path


def gpu_option(gpu: str) -> str:
    """pytest's option to measure baselines of this folder, with a space behind it. Emulated cases run where no GPU is
    declared: ``emulated`` is a folder and no GPU's name."""
    return "" if gpu == "emulated" else f"--fp8-gpu={gpu} "


def measuring(gpu: str, *cases: str) -> str:
    """The command that measures these cases anew, with a space behind it. The suites have none of a user's own."""
    run = "pytest" if any(case.startswith(OWN) for case in cases) else "pytest-fp8 suites"
    names = f'"{" or ".join(cases)}"' if len(cases) > 1 else cases[0]
    return f"{run} -k {names} {gpu_option(gpu)}--fp8-update "


# -- all of a folder ----------------------------------------------------------------------------------------------


def read_all(source: Source) -> Files:
    """All baselines of a folder or revision."""
    return {name: _one(source, name) for name in source.names()}


def _one(source: Source, name: Path) -> Baseline | BaselineError:
    try:
        found = load(source, name)
    except BaselineError as error:
        return error
    return found or BaselineError(B.UNREADABLE, f"{source.label(name)} was deleted")


def read_folder(folder: Path) -> Files:
    """All baselines below a folder, or the one in a file. Raises :class:`BaselineError` where there is neither."""
    if folder.is_dir():
        return read_all(Folder(folder))
    if folder.is_file():
        return {Path(folder.name): _one(Folder(folder.parent), Path(folder.name))}
    raise BaselineError(
        B.NOTHING_THERE,
        f"{folder} is neither a folder of baselines nor one of them",
        expected="a folder like baselines/, with <gpu>/<case>.json in it, or one such file",
        seen="nothing there",
        next_step="name it with --dir",
    )


def readable(files: Files) -> dict[tuple[str, str], Baseline]:
    """(GPU, case) -> baseline. Raises the :class:`BaselineError` of the first file that cannot be read, or that is not
    where its case's file belongs."""
    found = {}
    for path, stored in files.items():
        if isinstance(stored, BaselineError):
            raise stored
        if fault := misplaced(path, stored):
            raise fault
        found[stored.gpu, stored.case] = stored
    return found


def gpus_in(files: Files) -> set[str]:
    """The folders of GPUs among them."""
    return {path.parts[0] for path in files if len(path.parts) == 2}


def require_gpu(gpu: str, stored: Iterable[str]) -> None:
    """Raise :class:`SettingsError` for ``--gpu`` of a GPU that nobody knows and nothing is stored of."""
    if gpu and gpu not in (have := {*stored, *NAMES, "emulated"}):
        refuse_unknown(B.UNKNOWN_NAME, f"--gpu {gpu}: nothing is stored of such a GPU", gpu, sorted(have), LIST)


def named(text: str, files: Files) -> Files:
    """Those that a person means by a case, or by ``<gpu>/<case>`` as summaries print it. Raises
    :class:`SettingsError` with the name that was probably meant."""
    names = {path: (path.stem, path.with_suffix("").as_posix()) for path in files}
    found = {path: files[path] for path, both in names.items() if text in both}
    if not found:
        known = sorted({name["/" in text] for name in names.values()})
        refuse_unknown(B.UNKNOWN_NAME, f"no baseline of case {text!r}", text, known, LIST)
    return found


# -- what the stored histories of a GPU say of its noise ------------------------------------------------------------


def estimated(baselines: Iterable[Baseline]) -> Components:
    """The variance components of these baselines of one GPU. All cases of one run name its session alike."""
    found: dict[str, list[History]] = {"speedup": [], "busy_speedup": []}
    for baseline in baselines:
        if metric := baseline.gated:
            sessions = baseline.measured_in(metric)
            found[metric].append({f"{s.date} {s.commit} {s.run}": s.metrics[metric] for s in sessions})
    return components_of(found["speedup"], found["busy_speedup"])


def components_in(source: Source, gpu: str) -> Components:
    """The components of a GPU's stored baselines. A file that cannot be read is left out: the tests of its case, and
    ``check``, fail with it."""
    found = (_one(source, name) for name in source.names() if name.parts[:-1] == (gpu,))
    return estimated(each for each in found if isinstance(each, Baseline))
