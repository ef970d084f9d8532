"""Baselines as a reviewer names them: a folder, one file, or the folder as it was at a git revision."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
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
            next_step="name it with --dir, or run pytest with --fp8-report to get candidates",
        ) from None
    except BaselineError as error:
        return {Path(folder.name): error}


def of_all_gpus(files: Files, named: Path) -> tuple[Files, Path]:
    """What was read of ``named``, by the paths below the folder of all GPUs, and that folder. ``named`` may be one
    GPU's folder in it, or one of its files."""
    gpu = named.resolve() if named.is_dir() else named.resolve().parent
    here = {Path(gpu.name, path): stored for path, stored in files.items()}
    if any(isinstance(stored, Baseline) and path == _home(stored) for path, stored in here.items()):
        return here, gpu.parent
    return files, named


def _home(stored: Baseline) -> Path:
    return baseline_path(Path(), stored.gpu, stored.case)


def read_revision(folder: Path, revision: str) -> Files:
    """The baselines of a folder as they were at a git revision. Raises :class:`BaselineError`."""
    return _read(Revision(folder.parent if folder.is_file() else folder, revision))


def readable(files: Files, wanted: Collection[str] = ()) -> dict[tuple[str, str], Baseline]:
    """(GPU, case) -> baseline. Raises the :class:`BaselineError` of the first file that cannot be read, or that is not
    where its case's file belongs. ``wanted``: cases, also as ``<gpu>/<case>``; then only of their files, and others of
    that kind are left out."""
    names = {f"{case.rpartition('/')[2]}.json" for case in wanted}
    found = {}
    for path, stored in files.items():
        fault = _fault(path, stored)
        if isinstance(stored, Baseline) and not fault:
            found[stored.gpu, stored.case] = stored
        elif fault and (not names or path.name in names):
            raise fault
    return found


def _fault(path: Path, stored: Baseline | BaselineError) -> BaselineError | None:
    if isinstance(stored, BaselineError):
        return stored
    if len(path.parts) > 1 and path != _home(stored):
        return BaselineError(
            B.MISPLACED,
            f"{path} lies in another place than its case's file",
            expected=f"{stored.gpu}/{stored.case}.json",
            seen=str(path),
            cause="the file was renamed or copied",
            next_step="move it back",
        )
    return None


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


def named(
    text: str,
    known: Collection[tuple[str, str]],
    gpu: str = "",
    what: str = "baseline",
    listed: str = "pytest-fp8 baselines list",
) -> set[tuple[str, str]]:
    """Of all (GPU, case) those that a person means by a case, or by ``<gpu>/<case>`` as summaries print it. ``gpu``:
    that of an option. ``listed``: what shows them all. Raises :class:`SettingsError` with the name that was probably
    meant."""
    of, slash, case = text.rpartition("/")
    if slash and gpu not in ("", of):
        refuse(
            B.UNKNOWN_NAME,
            f"{text} is not of --gpu {gpu}",
            expected="one GPU",
            seen=f"{of} and {gpu}",
            next_step=f"{gpu}/{case}",
        )
    asked = of if slash else gpu
    found = {one for one in known if one[1] == case and (one[0] == asked or not (asked or slash))}
    if not found:
        here = sorted({f"{of}/{name}" if slash else name for other, name in known if asked in ("", other)})
        headline = f"no {what} of case {case!r}" + (f" for {asked}" if asked else "")
        if elsewhere := sorted(f"{other}/{name}" for other, name in known if name == case):
            refuse(
                B.UNKNOWN_NAME,
                headline,
                expected=", ".join(elsewhere),
                seen=repr(text),
                next_step=f"did you mean {elsewhere[0]}?",
            )
        refuse_unknown(B.UNKNOWN_NAME, headline, text, here or sorted(map("/".join, known)), otherwise=listed)
    return found


def _read(source: Source) -> Files:
    return {shown(name): _one(source, name) for name in source.names()}


def _one(source: Source, name: Path) -> Baseline | BaselineError:
    label = source.label(shown(name))
    try:
        if not all(re.fullmatch(NAME, part) for part in name.parts):
            raise Unsound("its name is not made of letters, digits, '.', '_' and '-'")
        text = source.text(name)
    except Unsound as error:
        return broken(label, error)
    if text is None:
        return BaselineError(B.UNREADABLE, f"{label} was deleted while it was read")
    try:
        return parse_text(text, label)
    except BaselineError as error:
        return error
