"""The controls by their ids, and arms that answer by hand as a control breaks them, on a GPU that is not there."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

from controls.catalogue import CATALOGUE
from helpers.fakes import FakeProcess, timed
from pytest_fp8.baselines.store import load_baseline, read_baseline
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.layers.check import STORED
from pytest_fp8.questions.layers.evidence import WireTime

ROOT = Path(__file__).parents[2]
BY_ID = {control.id: control for control in CATALOGUE}

BF16_MS = 120.0


def stored_speedup(recipe: str) -> float:
    """What the repository's own baseline says of 1B with torchao, so that new ones need no change here."""
    path = ROOT / f"baselines/h200/1b-torchao-{recipe}.json"
    values = load_baseline(path).values("speedup") if path.exists() else [[0.0]]
    return math.exp(median(median(process) for process in values))


FACTORS = {
    "fp8-slower": 1.031,
    "both-slower": 1.1,
    "no-compile": 2.7,
    "half-the-batch": 0.55,
    "reference-reads": 1.33,
    "reference-sleeps": 1.5,
    "no-optimizer-step": 0.94,
    "slow-wire": 1.3,
}
"""Control -> how much longer its broken arm's step takes."""


class BrokenProcess(FakeProcess):
    """Answers as an H200's arm that the control of its spec breaks; timings as stored for 1B with torchao."""

    @property
    def control(self):
        """The id of the control."""
        return next((control.id for control in CATALOGUE if control.path() == self.spec.control), None)

    def receive(self, timeout=0):
        building, answer = self.asked is None, super().receive(timeout)
        facts = {"compiled": self.control != "no-compile", "first_step": ""}
        return {**answer, **facts} if building else answer

    def blocks(self, count, steps, dropped):
        slower = FACTORS.get(self.control, 1.0)
        base = BF16_MS / (stored_speedup(self.spec.case.recipe) if self.is_fp8 else 1.0)
        times = [base * slower * float(1 + self.noise.normal(0, 0.002)) for _ in range(count)]
        return timed(times, count * (self.control == "compiled-in-blocks"))

    def layers(self):
        found = super().layers()
        control = self.control
        if control == "slow-attention":
            found["attention"] = {"sdpa": ["fmha_cutlassF"]}
        self._break_account(found, control)
        if control == "amax-frozen":
            found["stale_amax"] = found["converted"]
        if control == "recompute-outside":
            for product in found["products"]:
                if product["phase"] != "forward":
                    product.update(kind="bfloat16", kernel=found["families"]["bfloat16"][0])
        if control == "wrong-library":
            found["kinds"] = dict.fromkeys(found["converted"], "torchao.float8.float8_linear.Float8Linear")
            found["live_fp8"] = []
            found["calls"] = [{**call, "fp8": False} for call in found["calls"]]
        return found

    def _break_account(self, found, control):
        """The profile of a step of 113 ms, 7 ms of them the optimizer's, with what the control changes in it."""
        spent = found["milliseconds"]
        spent.update(rest=spent["rest"] - 7, optimizer=7.0)
        found.update(step_ms=[115.0] * 5, busy_ms=[113.0] * 5, compute_ms=[113.0] * 5)
        if control == "half-the-batch":
            for name in ("fp8 products", "other products", "attention", "rest"):
                spent[name] /= 2
            spent["busy"] = 60.0
        if control == "no-optimizer-step":
            spent.update(optimizer=0.0, busy=106.0)
        if self.spec.case.gpus > 1:
            gathered = 30.0 if control == "slow-wire" else 2.0
            row = WireTime("all-gather", "bfloat16", 24, 10**9, 2 * 10**9, gathered)
            found.update(wire=[to_plain(row)], exposed_ms=gathered, compute_ms=[113.0 - gathered] * 5)
            spent.update(communication=gathered)
        if control == "reference-reads":
            found["waits"] = {"cudaStreamSynchronize": 1}
        if control in ("reference-reads", "reference-sleeps"):
            found["step_ms"] = [BF16_MS * FACTORS[control]] * 5

    def memory(self):
        peaks = super().memory()
        if self.control == "memory-up":
            peaks = {**peaks, "peak_allocated": peaks["peak_allocated"] * 5 // 3}
        return peaks


def read_without_counts(*where):
    """A baseline without its counts and share of FP8: the fake model has two FP8 layers, half of its FLOPs; the
    baselines' models have 28 and 112."""
    found = read_baseline(*where)
    if found is None:
        return None
    kept = {name: values for name, values in found.newest.metrics.items() if name not in STORED}
    return replace(found, sessions=(replace(found.newest, metrics=kept),))
