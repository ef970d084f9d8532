"""Baselines as a reviewer names them: a folder, one file, or the folder as it was at a git revision."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.source import Folder, Revision, Source, shown
from pytest_fp8.baselines.store import baseline_path, broken, load_baseline, parse_text
from pytest_fp8.baselines.strict import NAME, Unsound
from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError, refuse, refuse_unknown
from pytest_fp8.gpu import NAMES

Files = Mapping[Path, Baseline | BaselineError]
"""Path below the folder -> the baseline, or why it cannot be read."""


def read_folder(folder: Path) -> Files:
    """All baselines below a folder, or the one in a file. Raises :class:`BaselineError` where there is neither."""
    if folder.is_dir():
        return _read(Folder(folder))
    try:
        return {Path(folder.name): load_baseline(folder)}
    except FileNotFoundError:
        raise BaselineError(
            B.NOTHING_THERE,
            f"{folder} is neither a folder of baselines nor one of them",
            expected="a folder like baselines/, with <gpu>/<case>.json in it, or one such file",
            seen="nothing there",
            next_step="name it with --dir",
        ) from None
    except BaselineError as error:
        return {Path(folder.name): error}


def read_revision(folder: Path, revision: str) -> Files:
    """The baselines of a folder as they were at a git revision. Raises :class:`BaselineError`."""
    return _read(Revision(folder.parent if folder.is_file() else folder, revision))


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


def misplaced(path: Path, stored: Baseline) -> BaselineError | None:
    """The error of a file in a folder that lies in another place than its case's."""
    home = baseline_path(Path(), stored.gpu, stored.case)
    if len(path.parts) == 1 or path == home:
        return None
    return BaselineError(
        B.MISPLACED,
        f"{path} holds the baseline of {stored.gpu}/{stored.case}",
        expected=str(home),
        seen=str(path),
        cause="the file was renamed or copied",
        next_step="move it back",
    )


def gpus_in(files: Files) -> set[str]:
    """The folders of GPUs among them."""
    return {path.parts[0] for path in files if len(path.parts) == 2}


def require_gpu(gpu: str, stored: Iterable[str]) -> None:
    """Raise :class:`SettingsError` for ``--gpu`` of a GPU that nobody knows and nothing is stored of."""
    if gpu and gpu not in (have := {*stored}) | {*NAMES, "emulated"}:
        refuse(
            B.UNKNOWN_NAME,
            f"--gpu {gpu}: nothing is stored of such a GPU",
            expected=f"one of {', '.join(sorted(have)) or ', '.join(NAMES)}",
            seen=gpu,
            next_step="pytest-fp8 baselines list shows what is stored",
        )


def named(text: str, files: Files) -> Files:
    """Those that a person means by a case, or by ``<gpu>/<case>`` as summaries print it. Raises
    :class:`SettingsError` with the name that was probably meant."""
    names = {path: (path.stem, path.with_suffix("").as_posix()) for path in files}
    found = {path: files[path] for path, both in names.items() if text in both}
    if not found:
        known = sorted({name["/" in text] for name in names.values()})
        listed = "pytest-fp8 baselines list"
        refuse_unknown(B.UNKNOWN_NAME, f"no baseline of case {text!r}", text, known, otherwise=listed)
    return found


def _read(source: Source) -> Files:
    return {shown(name): _one(source, name) for name in source.names()}


def _one(source: Source, name: Path) -> Baseline | BaselineError:
    label = source.label(shown(name))
    try:
        if not all(re.fullmatch(NAME, part) for part in name.parts):
            raise Unsound("its name is not made of letters, digits, '.', '_' and '-'")
        text = source.text(name)
        return parse_text(text, label) if text is not None else BaselineError(B.UNREADABLE, f"{label} was deleted")
    except Unsound as error:
        return broken(label, error)
    except BaselineError as error:
        return error
