"""What a step would take on more GPUs, with more layers and longer sequences: predicted from a measured account.

    pytest suites -m parallel -k "8b16-torchao-tensorwise and test_faster" --fp8-gpu=h200 --fp8-report=out
    python -m benchmarks.more_gpus out/report.json 8b16-torchao-tensorwise-fsdp2.2-4x4096 --model 8b --seq 8192

Instant: it reads the account of a case that trained with FSDP2, and measures nothing. It is a plan, not a result. Each
class of the BF16 step is scaled by what it depends on: products by their FLOPs, attention by layers, tokens and length,
the optimizer by the parameters of a GPU, other kernels by layers and tokens, the wire by the bytes that reach a GPU,
with the same share of it hidden. What FP8 earns and its casts go with the layers' products. The first row is the
measured case itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reports import report_at
from pytest_fp8.arms.memory_plan import GIB, peak_bytes, resident_bytes
from pytest_fp8.case import Case
from pytest_fp8.report.results import SAME_WORK
from pytest_fp8.report.tables import markdown_table, table
from pytest_fp8.zoo.shapes import SHAPES, Shape

BF16_BYTES = 2
COLUMNS = ("GPUs", "tokens of each", "BF16 memory", "gathered", "reduced", "wire", "BF16 step", "FP8 step", "speedup")


@dataclass(frozen=True)
class Work:
    """What each of several GPUs does in a step of a model under FSDP2."""

    shape: Shape
    gpus: int
    batch: float
    """Sequences on each GPU."""
    seq: int

    @property
    def tokens(self) -> float:
        return self.batch * self.seq

    @property
    def layer_weights(self) -> int:
        """Parameters of the repeated blocks. The embedding, the head and the last norm are the rest."""
        return self.shape.parameters - 2 * self.shape.vocab * self.shape.hidden

    @property
    def layer_products(self) -> float:
        """Proportional to the FLOPs of the blocks' Linears."""
        return self.tokens * self.layer_weights

    @property
    def products(self) -> float:
        """Proportional to the FLOPs of all Linears, the head included."""
        return self.layer_products + self.tokens * self.shape.vocab * self.shape.hidden

    @property
    def attention(self) -> float:
        return self.tokens * self.seq * self.shape.layers * self.shape.hidden

    @property
    def others(self) -> float:
        return self.tokens * self.shape.layers * self.shape.hidden

    @property
    def optimizer(self) -> float:
        return self.shape.parameters / self.gpus

    @property
    def gathered(self) -> float:
        """Bytes of the whole weights gathered in a step: those of blocks in the forward and in the backward pass."""
        return BF16_BYTES * (self.shape.parameters + self.layer_weights) * (self.gpus > 1)

    @property
    def reduced(self) -> float:
        """Bytes of the whole gradients reduced in a step."""
        return BF16_BYTES * self.shape.parameters * (self.gpus > 1)

    @property
    def wire(self) -> float:
        """Bytes that reach a GPU: all but its own shards."""
        return (self.gathered + self.reduced) * (self.gpus - 1) / self.gpus


@dataclass(frozen=True)
class Predicted:
    """Milliseconds of one step."""

    bf16: float
    fp8: float
    wire: float
    """Of BF16's collectives, hidden or not."""


def predict(account: Mapping[str, Any], measured: Work, asked: Work) -> Predicted:
    """``account``: as a report holds it, of the case whose work is ``measured``."""
    arm = account["bf16"]
    classes, wire = arm["classes"], sum(row["milliseconds"] for row in arm["wire"]["rows"])
    exposed, on_wire = arm["wire"]["exposed"], asked.wire / measured.wire
    parts = {
        "other products": asked.products / measured.products,
        "attention": asked.attention / measured.attention,
        "optimizer": asked.optimizer / measured.optimizer,
        "rest": asked.others / measured.others,
    }
    now = sum(classes[name] for name in parts) + exposed
    then = sum(classes[name] * times for name, times in parts.items()) + exposed * on_wire
    # Classes overlap, and the GPU idles between steps: both go with the whole.
    bf16 = arm["step"] * then / now
    layers = asked.layer_products / measured.layer_products
    fp8_exposed = account["fp8"]["wire"]["exposed"] - exposed
    gained = (account["earned_ms"] - account["casts_ms"]) * layers - fp8_exposed * on_wire
    return Predicted(bf16, bf16 - gained, wire * on_wire)


def work_of(case: str) -> Work:
    """The work of a case, from its name. Raises ``ValueError`` where it is none of FSDP2 with its sizes."""
    named = SAME_WORK.fullmatch(case)
    if named is None or not named["gpus"] or "-fsdp2." not in case:
        raise ValueError(f"{case!r:.80} names no case of FSDP2 with its batch, as in ...-fsdp2.2-4x4096")
    gpus = int(named["gpus"])
    return Work(SHAPES[case.partition("-")[0]], gpus, int(named["batch"]) / gpus, int(named["seq"]))


def row_of(model: str, asked: Work, found: Predicted) -> list[str]:
    parallel = "fsdp2" if asked.gpus > 1 else ""
    batch = round(asked.batch * asked.gpus)
    reference = Case(model, "bf16", "none", batch=batch, seq=asked.seq, gpus=asked.gpus, parallel=parallel)
    return [
        str(asked.gpus),
        f"{asked.batch:g}x{asked.seq}",
        f"{resident_bytes(reference) / GIB:.0f}, at its peak {peak_bytes(reference) / GIB:.0f} GiB",
        f"{asked.gathered / 1e9:.0f} GB" if asked.gpus > 1 else "-",
        f"{asked.reduced / 1e9:.0f} GB" if asked.gpus > 1 else "-",
        f"{found.wire:.0f} ms" if asked.gpus > 1 else "-",
        f"{found.bf16:.0f} ms",
        f"{found.fp8:.0f} ms",
        f"{found.bf16 / found.fp8:.2f}x",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.more_gpus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("case", help="a case of FSDP2 in that report, with an account")
    parser.add_argument("--model", help="a model of the suite; default: the case's")
    parser.add_argument("--seq", type=int, help="tokens of a sequence; default: the case's")
    parser.add_argument("--batch", type=int, default=1, help="sequences on each GPU; default: 1")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--markdown", action="store_true", help="as a table for a page of docs")
    options = parser.parse_args(arguments)
    try:
        measured = work_of(options.case)
    except ValueError as error:
        parser.error(str(error))
    own = options.case.partition("-")[0]
    with report_at(options.report) as report:
        if options.case not in report["entries"]:
            parser.error(f"{options.report} has no case {options.case}, but {', '.join(report['entries'])}")
        decisions = report["entries"][options.case]["decisions"]
        account = (decisions.get("faster") or decisions["speedup"])["numbers"]["account"]
        rows = [row_of(own, measured, predict(account, measured, measured))]
        for gpus in options.gpus:
            asked = Work(SHAPES[options.model or own], gpus, options.batch, options.seq or measured.seq)
            rows.append(row_of(options.model or own, asked, predict(account, measured, asked)))
    if options.markdown:
        print("\n".join(markdown_table(COLUMNS, rows)))
    else:
        table(COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
