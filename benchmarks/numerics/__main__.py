"""Measure the spread of healthy arms, and make the table of it that the limits are read from.

    python -m benchmarks.numerics measure spread-cpu.json                        # emulated recipes, 10 seeds
    python -m benchmarks.numerics measure spread-h200.json --gpu                 # torchao and Transformer Engine
    python -m benchmarks.numerics measure spread-8b.json --gpu --models 8b
    python -m benchmarks.numerics table spread-cpu.json spread-h200.json spread-8b.json

``measure`` builds each arm in a process of its own, one after the other, and asks it what the question asks, for
several seeds of weights and data. It writes one row for each case and seed. ``table`` writes
``pytest_fp8/questions/numerics/spread.json``. A row's values are those beyond their own statistical error, as the check
allows it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.healthy.models import deep, often, outliers, routed
from benchmarks.healthy.sound import toward, vectors
from pytest_fp8 import Case, Workload
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.numerics.check import differences
from pytest_fp8.questions.numerics.evidence import ArmNumerics, NumericsEvidence
from pytest_fp8.questions.numerics.products import AFTER_STEPS, Limits, distance, gain_error, judged_products
from pytest_fp8.recipes import library_of

SPREAD = Path(__file__).parents[2] / "pytest_fp8" / "questions" / "numerics" / "spread.json"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TRANSFORMER_ENGINE = ("delayed", "current", "block")
OWN = {
    model.__name__: Workload(model, lambda step: vectors(256), toward(lambda x: x))
    for model in (outliers, often, routed, deep)
}
"""Sound models that strain the question: name -> the workload."""
NOTHING = Limits(0.0, 0.0, 0.0)


def cases(gpu: bool, models: Iterable[str]) -> list[Case]:
    """The cases to measure: all recipes that the machine can run, compiled and not on a GPU."""
    if not gpu:
        zoo = [Case(m, "torchao", r, emulated=True) for m in models for r in TORCHAO]
        adapters = [Case("micro", "torchao", r, lora=8, emulated=True) for r in TORCHAO]
        own = [Case("own", "torchao", r, name=name, emulated=True) for name in OWN for r in TORCHAO]
        return zoo + adapters + own
    recipes = [("torchao", r) for r in TORCHAO] + [("transformer_engine", r) for r in TRANSFORMER_ENGINE]
    chosen = [Case(m, b, r) for m in models for b, r in recipes if m != "8b" or r in ("tensorwise", "current")]
    eager = [replace(case, compile=False) for case in chosen if case.model == "tiny"]
    own = [Case("own", b, r, name=name, compile=False) for name in OWN for b, r in recipes if "tiny" in models]
    return chosen + eager + own


def answers(case: Case, device: str, seeds: range, reference: bool) -> list[dict[str, Any]]:
    """What one arm says for each seed."""
    workload = OWN[case.name].ship("a benchmark") if case.name else None
    process = ArmProcess(case.backend, None, device == "cpu")
    try:
        process.build(ArmSpec(case, device, workload, 2 if device == "cpu" else None))
        return [process.request("numerics", moved=reference, seed=seed) for seed in seeds]
    finally:
        process.close()


def measure(out: Path, gpu: bool, models: list[str], seeds: range) -> None:
    device = "cuda" if gpu else "cpu"
    references: dict[str, list[dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    for case in cases(gpu, models):
        asked = seeds if case.model not in ("1b", "8b") else seeds[:2]
        key = case.reference().id
        try:
            if key not in references:
                references[key] = answers(case.reference(), device, asked, reference=True)
            fp8 = answers(case, device, asked, reference=False)
        except Exception as error:
            print(f"{case.id}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            continue
        for seed, mine, theirs in zip(asked, fp8, references[key], strict=True):
            rows.append(row(case, device, seed, mine, theirs))
            print(json.dumps(rows[-1]), flush=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")


def row(case: Case, device: str, seed: int, fp8: dict[str, Any], bf16: dict[str, Any]) -> dict[str, Any]:
    """The largest values of one pair and seed, each beyond its own statistical error."""
    evidence = NumericsEvidence(from_plain(ArmNumerics, fp8), from_plain(ArmNumerics, bf16))
    judged, found = judged_products(evidence), differences(evidence)
    later = judged_products(evidence, AFTER_STEPS)
    largest: dict[str, Iterable[float]] = {
        "sqnr_db": (distance(p) - NOTHING.sqnr_within(p.values) for p in judged),
        "distance_db": map(distance, judged),
        "gain": (abs(gain_error(p)) - 4 * p.gain_error for p in judged),
        "gain_error": (abs(gain_error(p)) for p in judged),
        "later_distance_db": map(distance, later),
        "later_gain_error": (abs(gain_error(p)) for p in later),
        "gradients": (d.relative / d.moved for d in found if d.moved),
        "gradient_error": (d.relative for d in found),
        "moved": (d.moved for d in found),
    }
    return {
        "recipe": f"{library_of(case.backend)} {case.recipe}",
        "case": case.id,
        "device": device,
        "seed": seed,
        "products": len(judged),
        "later_products": len(later),
        "parameters": len(found),
        **{name: max(values, default=0.0) for name, values in largest.items()},
    }


def table(files: list[Path]) -> None:
    rows = [each for file in files for each in json.loads(file.read_text())]
    found = []
    for recipe in sorted({each["recipe"] for each in rows}):
        mine = [each for each in rows if each["recipe"] == recipe]
        largest = {name: round(max(0.0, *(r[name] for r in mine)), 4) for name in ("sqnr_db", "gain", "gradients")}
        samples = {name: sum(r[name] for r in mine) for name in ("products", "parameters")}
        devices = ", ".join(sorted({r["device"] for r in mine}))
        samples |= {"pairs": len(mine), "cases": len({r["case"] for r in mine}), "devices": devices}
        found.append(f" {json.dumps(recipe)}: {json.dumps({**largest, **samples})}")
    SPREAD.write_text("{\n" + ",\n".join(found) + "\n}\n")
    print(f"wrote {SPREAD}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("out", type=Path)
    one.add_argument("--gpu", action="store_true")
    one.add_argument("--models", nargs="+", help="default: micro tiny on a CPU, tiny 1b on a GPU")
    one.add_argument("--seeds", type=int, default=10, help="of small models; 1b and 8b get two")
    two = commands.add_parser("table")
    two.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        table(given.files)
    else:
        models = given.models or (["tiny", "1b"] if given.gpu else ["micro", "tiny"])
        measure(given.out, given.gpu, models, range(given.seeds))


if __name__ == "__main__":
    main()
