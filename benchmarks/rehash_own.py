"""Give the stored baselines of the suite's own models (``baselines/<gpu>/own.*.json``) their case's hash of today.

    PYTHONPATH=. python benchmarks/rehash_own.py --gpu h200

For use after a change of how the hash is made, never after a change of a model: then the case is measured again. Each
case's reference runs its first step in a process of its own. Only ``case_hash`` and the file's
digest are rewritten; the script prints old -> new. ``--device cpu`` shows the hashes without writing any, ``--case``
takes a part of the files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from pytest_fp8 import Case, Workload
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.baselines.store import load_baseline, write_baseline
from pytest_fp8.report.tables import table

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True, help="folder below baselines/, e.g. h200")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", default="own.", help="the beginning of the cases' ids (default: all)")
    options = parser.parse_args()
    files = sorted((ROOT / "baselines" / options.gpu).glob(f"{options.case}*.json"))
    if not files:
        parser.error(f"no stored baseline begins with {options.case!r} in baselines/{options.gpu}")
    workloads = own_workloads()
    rows, failed = [], 0
    for path in files:
        stored = load_baseline(path)
        case, workload = workloads[stored.case]
        try:
            new = digest(case, workload, options.device)
        except Exception as error:
            rows.append((stored.case, stored.case_hash, f"{type(error).__name__}: {str(error)[:200]}", ""))
            failed += 1
            continue
        if options.device == "cuda":
            write_baseline(ROOT / "baselines", replace(stored, case_hash=new))
        unchanged = "case_hash alone" if options.device == "cuda" else "not written"
        rows.append((stored.case, stored.case_hash, new, unchanged))
    table(("case", "old hash", "new hash", "changed in the file"), rows)
    return int(failed > 0)


def own_workloads() -> dict[str, tuple[Case, Workload]]:
    """The suite's cases of own models by id, each with what its test file trains."""
    sys.path.insert(0, str(ROOT / "suites"))
    import test_loop
    import test_own_models

    import matrix

    makers = {"vit": test_own_models.vision_transformer, "moe": test_own_models.mixture_of_experts}
    return {case.id: (case, makers.get(case.name, test_loop.loop)(case)) for case in matrix.OWN}


def digest(case: Case, workload: Workload, device: str) -> str:
    """The hash of a case, its reference's first step run on ``device`` in a fresh process."""
    from pytest_fp8.worker.run.first_step import first_step

    spec = ArmSpec(case.reference(), device, workload.ship("benchmarks/rehash_own.py"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return case.digest(workload.fingerprint(fresh.submit(first_step, spec).result()))


if __name__ == "__main__":
    sys.exit(main())
