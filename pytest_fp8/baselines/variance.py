"""The variance components beside the baselines of a GPU: estimated from their histories, written, read strictly."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytest_fp8.baselines.atomic import updating, write_atomically
from pytest_fp8.baselines.check import Note
from pytest_fp8.baselines.folder import Files, of_all_gpus, read_folder, readable
from pytest_fp8.baselines.metrics import gated_speedup
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.source import Folder, Source
from pytest_fp8.baselines.store import unreadable
from pytest_fp8.baselines.strict import parse
from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError, refuse
from pytest_fp8.rules.variance import BUSY_RUNS, FREEDOM, MEASURED, Components, Session, estimate

NAME = "_variance.json"
FROM_PRIOR = ("session", "sessions", "process", "processes", "busy", "busy_sessions")
MOST = {"session": 0.02, "busy": 0.03, "process": 0.05, "block": 0.1}
"""A standard deviation beyond this is no GPU's: five times and more what H200s show. A file that says so would silence
the gate."""


WORDS = {
    "session": "sessions",
    "busy": "sessions, in busy time",
    "process": "processes",
    "block": "blocks",
}


def history_of(baseline: Baseline, metric: str) -> dict[str, Session]:
    """Session -> its processes, of the metric's current level, oldest first. All cases of one run name it alike."""
    return {f"{s.date} {s.commit} {s.run}": s.metrics[metric] for s in baseline.measured_in(metric)}


def estimated(baselines: Iterable[Baseline]) -> dict[str, Any]:
    """The content of the file: the components of these baselines of one GPU, and what they stand on."""
    gated = [(b, gated_speedup(b.metrics)) for b in baselines]
    steps, busy = (
        [history for b, metric in gated if metric == wanted and (history := history_of(b, metric))]
        for wanted in ("speedup", "busy_speedup")
    )
    histories = [*steps, *busy]
    later = [{name: session for name, session in one.items() if name.split()[-1] not in BUSY_RUNS} for one in busy]
    found, of_steps, of_busy = estimate(histories), estimate(steps), estimate(later, MEASURED.of_busy())
    found = dataclasses.replace(
        found,
        session=of_steps.session,
        sessions=of_steps.sessions,
        # What a block of steps stands for that has no other beside it: a busy time is one of a single step.
        block=of_steps.block,
        blocks=of_steps.blocks,
        busy=of_busy.session,
        busy_sessions=of_busy.sessions,
    )
    return {
        **{name: round(value, 6) if isinstance(value, float) else value for name, value in vars(found).items()},
        "from": {
            "sessions": sorted({name for history in histories for name in history}),
            "measured so far": {name: getattr(MEASURED, name) for name in FROM_PRIOR},
        },
    }


def read_components(source: Source, gpu: str) -> Components:
    """The components beside a GPU's baselines; those measured so far where there is no file. Raises
    :class:`BaselineError` for a file that cannot be believed."""
    name = Path(gpu, NAME)
    try:
        text = source.text(name)
        return _parsed(parse(text)) if text is not None else MEASURED
    except ValueError as error:
        raise unreadable(source.label(name), error) or BaselineError(
            B.VARIANCE,
            f"{source.label(name)} does not hold variance components",
            expected="what pytest-fp8 baselines variance writes",
            seen=str(error),
            cause="the file was cut off or edited by hand",
            next_step=f"pytest-fp8 baselines variance --gpu {gpu}",
        ) from error


def believed_components(folder: Path, gpu: str) -> Components:
    """As :func:`read_components`; those measured first where the file cannot be believed, which ``check`` names."""
    try:
        return read_components(Folder(folder), gpu)
    except BaselineError:
        return MEASURED


def _parsed(data: Any) -> Components:
    """Raises ``ValueError``."""
    names = [field.name for field in dataclasses.fields(Components)]
    if not isinstance(data, dict) or sorted(data) != sorted([*names, "from"]):
        raise ValueError(f"not an object with the fields {', '.join(names)}")
    for name in names:
        value = data[name]
        counts = name not in MOST
        if isinstance(value, bool) or not isinstance(value, int if counts else int | float):
            raise ValueError(f"{name} is {value!r:.40}")
        most = 10**6 if counts else MOST.get(name, 1.0)
        # A comparison with NaN is false, too.
        if not (1 if counts else 0) <= value <= most:
            raise ValueError(f"{name} is {value!r:.40}, not from {1 if counts else 0} to {most}")
    for name in ("session", "busy"):
        if not data[name]:
            raise ValueError(f"{name} is 0: no two sessions agree so well")
    return Components(**{name: data[name] for name in names})


def add_variance(actions: Any, common: argparse.ArgumentParser) -> None:
    """Add ``variance`` to the sub-commands of ``pytest-fp8 baselines``."""
    add = actions.add_parser(
        "variance", parents=[common], help="estimate how sessions, processes and blocks differ, and store it"
    )
    add.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the components of each GPU with speeds; gives the exit code 0. Raises :class:`BaselineError`."""
    named = options.dir
    files, options.dir = of_all_gpus(read_folder(named), named)
    if named.is_file():
        refuse(
            B.USAGE,
            "the components are those of all cases of a GPU",
            expected="a folder like baselines/, with <gpu>/<case>.json in it",
            seen=f"one file, {named}",
            next_step=f"pytest-fp8 baselines variance --dir {options.dir}",
        )
    found = readable(files)
    gpus = sorted({gpu for gpu, _ in found if options.gpu in ("", gpu)})
    if not gpus:
        raise BaselineError(
            B.NOTHING_THERE,
            f"no baselines{f' of {options.gpu}' if options.gpu else ''} in {options.dir}",
            expected="a folder like baselines/, with <gpu>/<case>.json in it",
            seen=", ".join(sorted({gpu for gpu, _ in found})) or "none",
            next_step="pytest-fp8 baselines list",
        )
    contents = {gpu: estimated(b for (g, _), b in sorted(found.items()) if g == gpu) for gpu in gpus}
    without = [gpu for gpu, content in contents.items() if not content["cases"]]
    contents = {gpu: content for gpu, content in contents.items() if gpu not in without}
    with updating(options.dir):
        for gpu in without:
            # Of an earlier release, or of histories that are gone: the gate could not read it.
            (options.dir / gpu / NAME).unlink(missing_ok=True)
        for gpu, content in contents.items():
            write_atomically(options.dir / gpu / NAME, json.dumps(content, indent=1, sort_keys=True) + "\n")
    if options.json:
        print(json.dumps(contents, indent=1, sort_keys=True))
        return 0
    for gpu in without:
        print(f"{gpu}: no case of it has a speed, so that nothing is estimated")
    for gpu, content in contents.items():
        print("\n".join([f"{gpu}:", *lines(_parsed(content)), f"wrote {options.dir / gpu / NAME}"]))
    return 0


def lines(components: Components) -> list[str]:
    """The components in words, each with its 95 % interval."""
    text = []
    for name, what in WORDS.items():
        if not getattr(components, FREEDOM[name]):
            continue
        low, high = components.interval(name)
        text.append(
            f"  between {what}: {getattr(components, name):.2%} "
            f"[{low:.2%}, {high:.2%}], {getattr(components, FREEDOM[name])} degrees of freedom"
        )
    two = math.sqrt(2) * components.session
    return [*text, f"  two sessions of an unchanged case differ by more than {1.96 * two:.1%} in one of twenty"]


def outdated_components(folder: Path, files: Files, only: str = "") -> list[Note]:
    """Errors for GPUs whose components are not those of the histories beside them. ``only``: this GPU's alone."""
    found = []
    stored = [baseline for baseline in files.values() if isinstance(baseline, Baseline)]
    for gpu in sorted({baseline.gpu for baseline in stored if only in ("", baseline.gpu)}):
        path = folder / gpu / NAME
        mine = [
            baseline for _, baseline in sorted(((b.case, b) for b in stored if b.gpu == gpu), key=lambda pair: pair[0])
        ]
        if path.exists() and read_components(Folder(folder), gpu) != _parsed(estimated(mine)):
            message = "not what the histories beside it give: sessions were added since, or it was edited"
            again = f"pytest-fp8 baselines variance --gpu {gpu} --dir {folder}"
            found.append(Note(B.VARIANCE, gpu, NAME, message, again))
    return found
