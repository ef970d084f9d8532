"""Timed blocks of a run of the suite as recordings: one JSON file per case, every block of every fresh process.

    pytest suites --fp8-gpu=h200 -m core --fp8-report=DIR
    python -m benchmarks.gate.record DIR/report.json

Run it in a clone, with the report of a session on the GPU whose noise is wanted; two sessions on different days are
better than one long one. A second recording of a case takes the next free name: ``<case>.2.json``.

The format, schema 1:

``schema``, ``case``, ``case_hash``
    The case as the suite defines it, and the hash of that definition.
``steps_per_block``
    Training steps in one block; ``dropped_steps`` more are run and not counted each time the arms change places.
``order``
    ``abba``, or ``turns`` where the arms do not fit the GPU together (half of BF16, all of FP8, the rest of BF16).
``processes``
    One entry per fresh pair of processes: ``bf16`` and ``fp8``, milliseconds per step of every block in the order
    taken. Two entries of each make one ABBA block: ``bf16[2i], fp8[2i], fp8[2i + 1], bf16[2i + 1]``. Beside them what
    the report has of the whole case: ``clocks_mhz`` (SM clock after each ABBA block; where the arms take turns, after
    each of the three), ``throttles`` (reasons seen), ``strangers`` (how many other processes used the GPU).
``provenance``
    Date, commit, GPU, driver, libraries, reason. No host name, no user name, no path.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCHEMA = 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/gate/recordings")
    options = parser.parse_args(arguments)
    for path in from_report(options.report, options.out):
        print(path.name)
    return 0


def from_report(report: Path, out: Path) -> list[Path]:
    """The timed blocks of a run's report as recordings, one file per case. The GPU's state is known for the whole of a
    case there, so that each of its processes carries all of it."""
    from pytest_fp8.baselines.atomic import write_atomically
    from pytest_fp8.plain import to_plain
    from pytest_fp8.report.files import read_report

    content, contents = read_report(report), {}
    for name, row in content.entries.items():
        timing = dict(row.timing)
        if not timing:
            continue
        shared = {key: timing.pop(key) for key in ("clocks_mhz", "throttles", "strangers")}
        timing["processes"] = [{**process, **shared} for process in timing["processes"]]
        facts = {"schema": SCHEMA, "case": name, "case_hash": row.case_hash, **timing}
        contents[name] = {**facts, "provenance": to_plain(content.provenance)}
    written = []
    for name, content in contents.items():
        path = free_name(out, name)
        write_atomically(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
        written.append(path)
    return written


def free_name(out: Path, name: str) -> Path:
    """``<out>/<name>.json``, or the first ``<name>.<n>.json`` that does not exist."""
    path, number = out / f"{name}.json", 2
    while path.exists():
        path, number = out / f"{name}.{number}.json", number + 1
    return path


if __name__ == "__main__":
    sys.exit(main())
