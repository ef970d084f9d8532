"""What the gate catches, what the checks that people have today catch, and how many false alarms the gate gives.

    python benchmarks/controls/run.py [--gpu h200] [--json FILE] [--markdown FILE] [--healthy N] [-k WORD]

Prints the catalogue of controls as a table. Without ``--gpu`` the rows that need one say so. ``--healthy N`` judges N
groups of three fresh seeds per recipe, and 1000 random draws of three of these seeds. Exits with 1 where a
control was not caught, or where a healthy arm was called broken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

# The controls are part of the suites, and the arms find them by the same path.
sys.path.insert(0, str(Path(__file__).parents[2] / "suites"))
from today import CHECKS

from control_runner import ControlRunner
from controls.catalogue import CATALOGUE
from controls.control import GPU, Control, micro
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.errors import Fp8Error
from pytest_fp8.gpu import detect, is_kind
from pytest_fp8.options import Settings
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence

DRAWS = 1000
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def main() -> int:
    arguments = _arguments()
    if not any(arguments.k in control.id for control in CATALOGUE):
        print(f"no control's id has {arguments.k!r} in it; ids: {', '.join(c.id for c in CATALOGUE)}", file=sys.stderr)
        return 2
    gpu, why = detect()
    on_gpu = gpu is not None and arguments.gpu is not None and is_kind(gpu, arguments.gpu)
    pool = ArmPool(gpu)
    runner = ControlRunner(Settings(), lambda: pool, gpu.key if gpu is not None else "none")
    start = time.monotonic()
    try:
        rows = [
            row_of(runner, control, on_gpu)
            for control in CATALOGUE
            if arguments.k in control.id and (arguments.healthy_only is False)
        ]
        healthy = [healthy_runs(runner, recipe, arguments.healthy) for recipe in RECIPES if arguments.healthy]
    finally:
        pool.close()
    print_table(rows)
    for result in healthy:
        print(
            f"healthy {result['recipe']}: {result['arms']} decisions on {result['seeds']} seeds and on live arms, "
            f"{result['draws']} on draws of three of these seeds: {result['alarms']} false alarms, "
            f"{result['undecided']} undecided"
        )
    print(f"{time.monotonic() - start:.0f} s; on a GPU: {'yes' if on_gpu else why or 'not asked for (--gpu)'}")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"controls": rows, "healthy": healthy}, indent=1) + "\n")
    missed = [row["id"] for row in rows if row["caught"] is False]
    return int(bool(missed) or any(result["alarms"] for result in healthy))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", help="also run the controls that need this GPU")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--markdown", type=Path, help="write the table there, for docs/controls.md")
    parser.add_argument("--healthy", type=int, default=4, help="groups of three seeds per recipe (0: none)")
    parser.add_argument("--healthy-only", action="store_true", help="no controls")
    parser.add_argument("-k", default="", help="only controls whose id contains this")
    return parser.parse_args()


def row_of(runner: ControlRunner, control: type[Control], on_gpu: bool) -> dict[str, Any]:
    """One control: what was found, and what each of today's checks says (``True``: it catches it too)."""
    row: dict[str, Any] = {
        "number": control.number,
        "id": control.id,
        "title": control.title,
        "source": control.source,
        "runs": control.runs(),
        "question": control.question,
        "code": control.code,
        "expects": list(control.verdicts),
        "caught": None,
        "verdict": "",
        "headline": "",
        "today": {},
    }
    if control.runs() == GPU and not on_gpu:
        return row
    try:
        outcome, seen = runner.run_and_look(control)
    except Fp8Error as error:
        return {**row, "caught": False, "verdict": "ERROR", "headline": error.headline, "message": error.message}
    passes = {name.replace("\n", " "): check(seen) if seen else None for name, check in CHECKS.items()}
    return {
        **row,
        "caught": outcome.caught,
        "verdict": outcome.verdict,
        "headline": outcome.headline,
        "message": outcome.message,
        "today": {name: None if passed is None else not passed for name, passed in passes.items()},
        "seen": asdict(seen) if seen else None,
    }


def healthy_runs(runner: ControlRunner, recipe: str, groups: int) -> dict[str, Any]:
    """Live decisions on healthy arms, and the loss rule on every draw of three seeds, up to :data:`DRAWS`."""
    pair = runner.pair_of(micro(recipe))
    alarms = undecided = live = 0
    for decision in (pair.layers(), pair.checkpoints()):
        live += 1
        alarms += decision.verdict.value in ("FAIL", "INVALID")
    curves: dict[str, dict[int, Curve]] = {"fp8": {}, "bf16": {}, "twin": {}}
    wanted = {"steps": pair.case.horizon}
    for seed in range(3 * groups):
        curves["fp8"][seed] = from_plain(Curve, pair.fp8.request("curve", seed=seed, **wanted))
        for name, jitter in (("bf16", False), ("twin", True)):
            curves[name][seed] = from_plain(Curve, pair.bf16.request("curve", seed=seed, jitter=jitter, **wanted))
    every = list(itertools.combinations(range(3 * groups), 3))
    draws = random.Random(0).sample(every, min(DRAWS, len(every)))
    groups_of_three = [tuple(range(3 * g, 3 * g + 3)) for g in range(groups)]
    for seeds in [*groups_of_three, *draws]:
        drawn = {name: {s: runs[s] for s in seeds} for name, runs in curves.items()}
        verdict = check_loss(LossEvidence(**drawn)).verdict.value
        alarms += verdict in ("FAIL", "INVALID")
        undecided += verdict == "INCONCLUSIVE"
    return {
        "recipe": recipe,
        "seeds": 3 * groups,
        "arms": live + groups,
        "draws": len(draws),
        "alarms": alarms,
        "undecided": undecided,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from pytest_fp8.report.tables import new_table

    if not rows:
        return
    table = new_table()
    for name, wrap in (("", False), ("control", False), ("pytest-fp8", False), ("because", True)):
        table.add_column(name, no_wrap=not wrap, overflow="fold")
    for name in CHECKS:
        table.add_column(name)
    for row in rows:
        cells = [str(row["number"]), row["title"], *_ours(row)]
        cells += [_today(row["today"].get(name.replace("\n", " "))) for name in CHECKS]
        table.add_row(*cells)
    # A log has no width of its own.
    Console(width=max(Console().width, 150)).print(table)
    ran = [row for row in rows if row["caught"] is not None]
    print(f"caught with the right cause: {sum(row['caught'] for row in ran)} of {len(ran)} that ran; ", end="")
    counts = {name: sum(row["today"].get(name.replace("\n", " ")) is True for row in ran) for name in CHECKS}
    print(", ".join(f"{name.replace(chr(10), ' ')}: {count}" for name, count in counts.items()))


def markdown(rows: list[dict[str, Any]]) -> str:
    """What today's checks say, for docs/controls.md: those of the rows that they were asked of."""
    names = [name.replace("\n", " ") for name in CHECKS]
    lines = ["| | control | pytest-fp8 | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for row in rows:
        if row["today"]:
            ours = "caught" if row["caught"] else "missed"
            today = [{True: "caught", False: "-", None: ""}[row["today"].get(name)] for name in names]
            lines.append(f"| {row['number']} | {row['title']} | {ours} | " + " | ".join(today) + " |")
    return "\n".join(lines)


def _ours(row: dict[str, Any]) -> tuple[str, str]:
    if row["caught"] is None:
        return "on a GPU", f"[dim]asks {row['question']}[/dim]"
    colour = "green" if row["caught"] else "red"
    word = f"{row['verdict']} ({row['question']})" if row["caught"] else f"MISSED: {row['verdict']}"
    return f"[{colour}]{word}[/{colour}]", row["headline"].replace("[", "\\[")


def _today(caught: bool | None) -> str:
    return {True: "caught", False: "-", None: "[dim]n/a[/dim]"}[caught]


if __name__ == "__main__":
    sys.exit(main())
