"""Stored baselines: one JSON file per case and GPU, read strictly, written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

from pytest_fp8.baselines.atomic import write_atomically
from pytest_fp8.baselines.record import SCHEMA, Baseline, EditedByHand, parse_baseline
from pytest_fp8.baselines.source import Folder, Source
from pytest_fp8.baselines.strict import NAME, Unsound, parse, quoted, read_regular
from pytest_fp8.case import OWN
from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError


def baseline_path(folder: Path, gpu: str, case: str) -> Path:
    """``<folder>/<gpu>/<case>.json``; a name that would leave the folder is refused."""
    for part in (gpu, case):
        if not re.fullmatch(NAME, part):
            raise BaselineError(
                B.BAD_NAME, f"{part!r} cannot name a baseline", expected="letters, digits, '.', '_' and '-'", seen=part
            )
    return folder / gpu / f"{case}.json"


def read_baseline(source: Path | Source, gpu: str, case: str, case_hash: str) -> Baseline | None:
    """The baseline of a case in a folder or at a git revision, or ``None`` where there is none.

    Raises :class:`BaselineError` naming the file for one that is corrupt, of another schema, of another GPU or case, or
    of a case whose definition has changed: none of these is ever compared with.
    """
    if isinstance(source, Path):
        source = Folder(source)
    name = baseline_path(Path(), gpu, case)
    path = source.label(name)
    try:
        text = source.text(name)
    except Unsound as error:
        raise broken(path, error) from error
    if text is None:
        return None
    found = parse_text(text, path)
    if (found.gpu, found.case) != (gpu, case):
        raise BaselineError(
            B.MISPLACED,
            f"{path} is a baseline of another {'GPU' if found.gpu != gpu else 'case'}",
            expected=f"{gpu}/{case}",
            seen=f"{found.gpu}/{found.case}",
            cause="the file was renamed or copied",
            next_step=f'restore it, or delete it and measure again: {measuring(gpu, case)}"..."',
        )
    if found.case_hash != case_hash:
        raise _redefined(path, found, case_hash)
    return found


def gpu_option(gpu: str) -> str:
    """pytest's option to measure baselines of this folder, with a space behind it. Emulated cases run where no GPU is
    declared: ``emulated`` is a folder and no GPU's name."""
    return "" if gpu == "emulated" else f"--fp8-gpu={gpu} "


def measuring(gpu: str, *cases: str) -> str:
    """The command that measures these cases anew, with a space behind it. The suites have none of a user's own."""
    run = "pytest" if any(case.startswith(OWN) for case in cases) else "pytest-fp8 suites"
    names = f'"{" or ".join(cases)}"' if len(cases) > 1 else cases[0]
    return f"{run} -k {names} {gpu_option(gpu)}--fp8-update "


class Superseded(BaselineError):
    """What is stored is of another definition or format, and measuring again takes its place."""


def _redefined(path: str, found: Baseline, case_hash: str) -> BaselineError:
    own = found.case.startswith(OWN)
    return Superseded(
        B.REDEFINED,
        f"{path} was measured for another definition of case {found.case!r}",
        expected=f"case hash {case_hash}",
        seen=found.case_hash,
        cause="the model, its batch, one of the workload's functions, its version=, the recipe or the way of measuring "
        "changed since; or a function draws sizes at random, so that each run has another hash"
        if own
        else "the case's model, recipe, sizes, data or way of measuring changed since",
        next_step=f'measure it again: {measuring(found.gpu, found.case)}"the case changed: ..."',
    )


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


def load_baseline(path: Path) -> Baseline:
    """The baseline in a file, whatever its name and folder say. Raises ``FileNotFoundError`` or
    :class:`BaselineError` naming the file."""
    try:
        text = read_regular(path)
    except Unsound as error:
        raise broken(str(path), error) from error
    return parse_text(text, str(path))


def parse_text(text: str, path: str) -> Baseline:
    """A baseline from the text of a file called ``path``. A missing or unknown field is an error, and so is a value of
    another type or outside its range. Raises :class:`BaselineError`, which names file and field."""
    try:
        data = parse(text)
        schema = data.get("schema", SCHEMA) if isinstance(data, dict) else SCHEMA
        if schema == SCHEMA:
            return parse_baseline(data)
    except EditedByHand as error:
        raise BaselineError(
            B.EDITED,
            f"{path} was edited by hand",
            expected="the digest of what the file holds",
            seen="another digest",
            cause="figures or their origin were changed after they were measured, or a merge mixed two files",
            next_step=f"git diff -- {path} shows the edit, and pytest-fp8 baselines diff --git REV what it does to a "
            "whole file; restore it, or delete it and measure again with --fp8-update",
        ) from error
    except Unsound as error:
        raise broken(path, error) from error
    older = type(schema) is int and schema < SCHEMA
    # What a newer version wrote is a history that this one must not replace.
    raise (Superseded if older else BaselineError)(
        B.OTHER_SCHEMA,
        f"{path} has another schema",
        expected=f"schema {SCHEMA}",
        seen=f"schema {quoted(schema)}",
        cause=f"{'an older' if older else 'a newer'} version of pytest-fp8 wrote it",
        next_step="measure the case again with --fp8-update" if older else "update pytest-fp8",
    )


def write_baseline(folder: Path, baseline: Baseline) -> Path:
    """Write atomically: a reader sees the old file or the new one, and after any failure the old one is still there."""
    path = baseline_path(folder, baseline.gpu, baseline.case)
    text = json.dumps(baseline.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"
    parse_text(text, str(path))
    write_atomically(path, text)
    return path


def broken(path: str, why: Exception) -> BaselineError:
    """``why``: what reading it ended in; the system's own error is its cause."""
    return unreadable(path, why) or BaselineError(
        B.UNREADABLE,
        f"{path} is not a readable baseline",
        expected=f"schema {SCHEMA} of pytest-fp8, in JSON",
        seen=str(why),
        cause="the file was cut off, edited by hand or merged with conflict markers",
        next_step=f"restore it (git checkout -- {shlex.quote(str(path))}), or delete it and measure again: "
        '--fp8-update="..."',
    )


def unreadable(path: str, why: Exception) -> BaselineError | None:
    """The error where the system refuses to read the file; else ``None``. ``why``: as in :func:`broken`."""
    if not isinstance(why.__cause__, NotADirectoryError | PermissionError):
        return None
    return BaselineError(
        B.NO_ACCESS,
        f"{path} cannot be read",
        expected="a file that this user may read, in a folder",
        seen=str(why),
        cause="something else stands at one of the folders' names, or the permissions are another user's",
        next_step=f"ls -ld {next(each for each in (Path(path), *Path(path).parents) if os.path.lexists(each))}",
    )
