"""Arms that misbehave, and sessions that are sent signals; prints a table of each, and ends with 1 at the first fault.

    python -m benchmarks.faults catalogue [--only WORD] [--interpreter]
    python -m benchmarks.faults signals [--signals 500] [--seed 0] [--gpu]

On any machine: the arms run on the CPU, but for `--gpu`, where they take this machine's GPU.
"""

from __future__ import annotations

import argparse
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    commands = parser.add_subparsers(dest="command", required=True)
    catalogue = commands.add_parser("catalogue", help="what code in an arm may do to its process")
    catalogue.add_argument("--only", default="", help="those with this word")
    catalogue.add_argument("--interpreter", action="store_true", help="arms are fresh interpreters, as on a GPU")
    signals = commands.add_parser("signals", help="signals to pytest, xdist's workers and arms")
    signals.add_argument("--signals", type=int, default=60)
    signals.add_argument("--seed", type=int, default=0)
    signals.add_argument("--gpu", action="store_true", help="arms take the GPU, whose memory must be free after")
    asked = parser.parse_args()
    start = time.monotonic()
    faults = {"catalogue": _catalogue, "signals": _signals}[asked.command](asked)
    print(f"{faults} faults, {time.monotonic() - start:.0f} s")
    return int(faults > 0)


def _catalogue(asked: argparse.Namespace) -> int:
    from benchmarks.faults.catalogue import try_one
    from benchmarks.faults.misbehaviours import CATALOGUE

    chosen = [wrong for wrong in CATALOGUE if asked.only in wrong.what and not (asked.interpreter and wrong.forks_only)]
    print(f"{'what the arm does':52} {'ended':10} {'s':>5} {'MB':>5}  what is wrong")
    faults = 0
    for wrong in chosen:
        seen = try_one(wrong, fork=not asked.interpreter)
        faults += bool(seen.faults)
        print(f"{seen.what:52} {seen.kind:10} {seen.seconds:5.1f} {seen.megabytes:5.0f}  {'; '.join(seen.faults)}")
        sys.stdout.flush()
    print(f"{len(chosen)} misbehaviours: ", end="")
    return faults


def _signals(asked: argparse.Namespace) -> int:
    from benchmarks.faults.signals import campaign

    return campaign(asked.signals, asked.seed, asked.gpu)


if __name__ == "__main__":
    sys.exit(main())
