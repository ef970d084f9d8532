"""Which learning rate moves enough bfloat16 weights of a model of the suite, and still lets its loss fall steadily.

    python -m benchmarks.learning [--model 8b] [--device cuda] [--rates 5e-6 2e-5 5e-5] [--warm-up 0 6] [--steps 12]

Prints, for the BF16 reference and for torchao's tensorwise recipe: the share of weights that moved, the losses, their
fall with its standard error, and the gap between the arms. One arm after the other, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

SEEDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-6, 2e-5, 5e-5])
    parser.add_argument("--warm-up", type=int, nargs="+", default=[0, 6], help="steps of a linear rise to the rate")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--arm", default="", help="measure this recipe in this process, or 'bf16'")
    asked = parser.parse_args()
    if asked.arm:
        measure(asked)
        return
    answers = {}
    for arm in ("bf16", "tensorwise"):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.learning", *sys.argv[1:], "--arm", arm],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        answers[arm] = json.loads(done.stdout.splitlines()[-1])
    report(answers)


def measure(asked: argparse.Namespace) -> None:
    """Curves of one arm for each rate and warm-up, as one line of JSON."""
    from pytest_fp8.arms.spec import ArmSpec
    from pytest_fp8.case import Case
    from pytest_fp8.worker.curve import curve
    from pytest_fp8.worker.run.engine import Engine

    class WithRate(Engine):
        rate, steps_of_warm_up = 1e-3, 0

        def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(1.0, (step + 1) / max(1, self.steps_of_warm_up))
            return super().training_batch(seed, step, whole)

    emulated = asked.device == "cpu"
    case = Case(asked.model, "torchao", "tensorwise", emulated=emulated)
    engine = WithRate(ArmSpec(case.reference() if asked.arm == "bf16" else case, asked.device))
    rows = []
    for rate in asked.rates:
        for warm_up in asked.warm_up:
            engine.rate, engine.steps_of_warm_up = rate, warm_up
            curves = [curve(engine, seed, asked.steps) for seed in range(SEEDS)]
            rows.append({"rate": rate, "warm_up": warm_up, "curves": curves})
    print(json.dumps(rows))


def report(answers: dict[str, list[dict]]) -> None:
    from pytest_fp8.plain import from_plain
    from pytest_fp8.questions.loss.evidence import Curve
    from pytest_fp8.questions.loss.learning import moved_share
    from pytest_fp8.rules.loss import loss_fall, tail_gap

    for one, other in zip(answers["bf16"], answers["tensorwise"], strict=True):
        bf16, fp8 = ({c["seed"]: from_plain(Curve, c) for c in row["curves"]} for row in (one, other))
        fall = loss_fall([c.losses for c in bf16.values()])
        gaps = [tail_gap(fp8[s].losses, bf16[s].losses) for s in bf16]
        print(f"rate {one['rate']:g}, warm-up {one['warm_up']}")
        print(
            f"  moved {moved_share(bf16):.1%} (FP8 {moved_share(fp8):.1%}), fall {fall.amount:.3f} +- {fall.error:.3f}"
        )
        print(f"  gaps {', '.join(f'{gap:+.4f}' for gap in gaps)}")
        for name, arm in (("BF16", bf16), ("FP8", fp8)):
            print(f"  {name}: " + " ".join(f"{x:.2f}" for x in arm[0].losses))


if __name__ == "__main__":
    main()
