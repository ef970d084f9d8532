"""Asks every question of every sound workload, and counts false alarms.

    python -m benchmarks.healthy [--recipe tensorwise] [--seeds 10] [--only lstm]

On 16 cores, in as many processes: for i in {0..15}; do python -m benchmarks.healthy --part $i/16 > $i.txt & done

On any machine: torchao's numerics are emulated on the CPU. Ends with 1 where a sound workload was failed, called
INVALID or stopped by an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from benchmarks.healthy.catalogue import CATALOGUE
from benchmarks.healthy.run import RECIPES, Answer, Runner


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--seeds", type=int, default=1, help="draws of weights and data")
    parser.add_argument("--only", nargs="+", default=[""], help="workloads whose name has one of these in it")
    parser.add_argument("--steps", type=int, default=0, help="ask the loss alone, over curves of so many steps")
    parser.add_argument("--part", default="0/1", help="every n-th workload, from the i-th on: i/n")
    asked = parser.parse_args()
    index, parts = map(int, asked.part.split("/"))
    chosen = [entry for entry in CATALOGUE if any(word in entry.name for word in asked.only)][index::parts]
    answers: list[Answer] = []
    start = time.monotonic()
    with Runner() as runner:
        for seed in range(asked.seeds):
            for entry in chosen:
                began = time.monotonic()
                recipes = filter(entry.takes, asked.recipe)
                new = [answer for recipe in recipes for answer in runner.ask(entry, recipe, seed, asked.steps)]
                answers += new
                verdicts = " ".join(f"{answer.question} {answer.verdict}" for answer in new)
                print(f"{entry.name:32} seed {seed}  {time.monotonic() - began:5.1f} s  {verdicts}", flush=True)
                for message in dict.fromkeys(answer.message for answer in new if answer.verdict != "PASS"):
                    print(f"    {message}", flush=True)
    counted = Counter(answer.verdict for answer in answers)
    print(f"\n{len(chosen)} workloads, {len(answers)} questions in {time.monotonic() - start:.0f} s: {dict(counted)}")
    return int(any(answer.alarm for answer in answers) or not answers)


if __name__ == "__main__":
    sys.exit(main())
