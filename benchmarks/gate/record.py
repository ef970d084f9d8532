"""Record timed blocks on a GPU: one JSON file per case, every block of every fresh process in the order taken.

    python -m benchmarks.gate.record --case 1b-torchao-tensorwise --processes 4 --blocks 24 --out DIR

    python -m benchmarks.gate.record --from-report .fp8-report/report.json --out DIR

The second takes the blocks that a run of the suite has kept in its report, for all its cases. Run it by hand, in a
clone, on the GPU whose noise is wanted; twice on different days is better than once for long. The file is written anew
after every process, so that an interrupt keeps all whole processes. A second recording of a case takes the next free
name: ``<case>.2.json``.

The format, schema 1:

``schema``, ``case``, ``case_hash``
    The case as the suite defines it, and the hash of that definition.
``steps_per_block``
    Training steps in one block; ``dropped_steps`` more are run and not counted each time the arms change places.
``order``
    ``abba``, or ``turns`` where the arms do not fit the GPU together (half of BF16, all of FP8, the rest of BF16).
``processes``
    One entry per fresh pair of processes: ``bf16`` and ``fp8``, milliseconds per step of every block in the order
    taken. Two entries of each make one ABBA block: ``bf16[2i], fp8[2i], fp8[2i + 1], bf16[2i + 1]``. Beside them
    ``clocks_mhz`` (SM clock after each ABBA block; where the arms take turns, after each of the three), ``throttles``
    (reasons seen), ``strangers`` (how many other processes used the GPU), ``build_seconds`` (wall clock until both
    arms were warm).
``provenance``
    Date, commit, GPU, driver, libraries, reason. No host name, no user name, no path.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCHEMA = 1


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.from_report is not None:
        for path in from_report(options.from_report, options.out):
            print(path.name)
        return 0
    from pytest_fp8.arms.pool import ArmPool
    from pytest_fp8.errors import Fp8Error
    from pytest_fp8.gpu import detect

    gpu, reason = detect()
    if gpu is None:
        print(f"nothing can be recorded here: {reason}", file=sys.stderr)
        return 2
    pool = ArmPool(gpu)
    try:
        record(options.case, pool, options.processes, options.blocks, options.out, options.reason)
    except KeyboardInterrupt:
        print("stopped; whole processes are kept", file=sys.stderr)
        return 130
    except Fp8Error as error:
        print(error.message, file=sys.stderr)
        return 1
    finally:
        pool.close()
    return 0


def record(name: str, pool: Any, processes: int, blocks: int, out: Path, reason: str) -> Path:
    """Measure ``processes`` fresh pairs of ``blocks`` ABBA blocks each; gives the file."""
    from pytest_fp8.arms.pair import PairArms
    from pytest_fp8.arms.stopwatch import BUILD
    from pytest_fp8.baselines.atomic import write_atomically
    from pytest_fp8.baselines.provenance import provenance
    from pytest_fp8.errors import OUT_OF_MEMORY, ArmError
    from pytest_fp8.questions.speed.timing import BlockTimer

    case = cases()[name]
    arms = PairArms(case, pool, None)
    timer = BlockTimer(arms)
    path = free_name(out, name)
    said = provenance(ROOT, pool.gpu.describe(), reason)
    taken: list[dict[str, Any]] = []
    for index in range(processes):
        build_before, states_before = pool.stopwatch.by_operation.get(BUILD, 0.0), len(timer.beside.states)
        started = time.monotonic()
        if index == 0:
            arms.start()
        before = timer.settings()["order"] if taken else ""
        arms.with_room(partial(timer.measure, index + 1, blocks))
        if before not in ("", timer.settings()["order"]):
            raise ArmError(
                OUT_OF_MEMORY,
                f"the arms of {name} turned out not to fit this GPU together, after {index} pair(s) of processes",
                expected="pairs that are all timed side by side, or all by turns",
                seen=f"{path.name} has those timed side by side",
                next_step="delete it, and record a smaller case or on a GPU with more memory",
            )
        states = timer.beside.states[states_before:]
        taken.append(
            {
                "bf16": timer.reference[index],
                "fp8": timer.other[index],
                "clocks_mhz": [state.clock for state in states],
                "throttles": sorted({word for state in states for word in state.throttles}),
                "strangers": len({pid for state in states for pid in state.strangers}),
                "build_seconds": round(pool.stopwatch.by_operation.get(BUILD, 0.0) - build_before, 2),
                "seconds": round(time.monotonic() - started, 2),
            }
        )
        content = {
            "schema": SCHEMA,
            "case": name,
            "case_hash": case.digest(),
            **timer.settings(),
            "processes": taken,
            "provenance": said,
        }
        write_atomically(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
        print(f"{path.name}: process {index + 1} of {processes}, {taken[-1]['seconds']:.0f} s")
    return path


def from_report(report: Path, out: Path) -> list[Path]:
    """The timed blocks of a run's report as recordings, one file per case. The GPU's state is known for the whole of a
    case there, so that each of its processes carries all of it; the time to build is not known."""
    from benchmarks.reports import report_at
    from pytest_fp8.baselines.atomic import write_atomically

    contents = {}
    with report_at(report) as data:
        for name, entry in data["entries"].items():
            timing = dict(entry["timing"])
            if not timing:
                continue
            shared = {key: timing.pop(key) for key in ("clocks_mhz", "throttles", "strangers")}
            timing["processes"] = [{**process, **shared, "build_seconds": None} for process in timing["processes"]]
            content = {"schema": SCHEMA, "case": name, "case_hash": entry["case_hash"], **timing}
            contents[name] = {**content, "provenance": dict(data["provenance"])}
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


def cases() -> dict[str, Any]:
    """The suite's cases that ask for speed, and BF16 against BF16, by id."""
    sys.path.insert(0, str(ROOT / "suites"))
    import matrix

    return {case.id: case for case in [*matrix.ONE_B, *matrix.EIGHT_B, *matrix.TINY, matrix.NULL]}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", choices=sorted(cases()), metavar="CASE")
    what.add_argument("--from-report", type=Path, metavar="FILE")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=24, help="ABBA blocks per process")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/gate/recordings")
    parser.add_argument("--reason", default="noise of the gate's benchmark")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
