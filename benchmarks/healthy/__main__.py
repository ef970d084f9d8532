"""Asks every question of every sound workload, and counts false alarms.

    python -m benchmarks.healthy [--recipe tensorwise] [--seeds 10] [--only lstm] [--question loss] [--json FILE]

On 16 cores, in as many processes: for i in {0..15}; do python -m benchmarks.healthy --part $i/16 --json $i.json & done

On any machine: torchao's numerics are emulated on the CPU. Ends with 1 where a sound workload was failed, called
INVALID or stopped by an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.healthy.catalogue import CATALOGUE
from benchmarks.healthy.run import RECIPES, Answer, Runner, counted
from pytest_fp8.case import QUESTIONS


def main() -> int:
    asked = _arguments()
    chosen = [entry for entry in CATALOGUE if not asked.only or any(word in entry.name for word in asked.only)]
    index, parts = map(int, asked.part.split("/"))
    chosen = chosen[index::parts]
    if not chosen:
        print(f"no workload's name has {' or '.join(asked.only)} in it; --list shows the names", file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(f"{entry.name:32} {entry.what}" for entry in chosen))
        return 0
    answers: list[Answer] = []
    start = time.monotonic()
    with Runner() as runner:
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            for entry in chosen:
                began = time.monotonic()
                new = [answer for recipe in asked.recipe for answer in runner.ask(entry, recipe, seed, asked.question)]
                answers += new
                print(f"{entry.name:32} seed {seed}  {time.monotonic() - began:5.1f} s  {_short(new)}", flush=True)
                for line in _said(new, asked.full):
                    print(line, flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps([answer.to_json() for answer in answers], indent=1) + "\n")
    print(
        f"\n{len(chosen)} workloads, {', '.join(asked.recipe)}, {asked.seeds} seeds, {time.monotonic() - start:.0f} s"
    )
    for verdict, count in counted(answers).items():
        print(f"{verdict:20} {count}")
    return int(any(answer.alarm for answer in answers))


def _short(answers: list[Answer]) -> str:
    return " ".join(
        f"{question} {'/'.join(a.verdict for a in answers if a.question == question)}"
        for question in dict.fromkeys(a.question for a in answers)
    )


def _said(answers: list[Answer], full: bool) -> Iterator[str]:
    """What was said where it was not PASS, each headline once."""
    for headline, answer in {answer.headline: answer for answer in answers if answer.verdict != "PASS"}.items():
        yield f"    {answer.recipe} {answer.question}: {answer.message if full else headline}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--seeds", type=int, default=1, help="draws of weights and data")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], help="workloads whose name has one of these in it")
    parser.add_argument("--question", nargs="+", default=QUESTIONS, choices=QUESTIONS)
    parser.add_argument("--part", default="0/1", help="every n-th workload, from the i-th on: i/n")
    parser.add_argument("--json", type=Path, help="write every answer")
    parser.add_argument("--full", action="store_true", help="whole messages in place of headlines")
    parser.add_argument("--list", action="store_true", help="names, and what is special about each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
