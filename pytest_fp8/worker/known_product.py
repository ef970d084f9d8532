"""One FP8 product of known operands: ``python -m pytest_fp8.worker.known_product BACKEND RECIPE [emulated]``.

The last line of its output is JSON: ``off``, the error against the exact product as a fraction; ``kernel``, the name of
the kernel that took most of the time; ``cudnn``, the version that torch loaded. Or ``error``: why there was no product.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from pytest_fp8.backends import backend
from pytest_fp8.case import OWN, Case
from pytest_fp8.worker.record.trace import longest, plain_events

SIZE = {"cuda": 4096, "cpu": 256}
"""Rows, columns and inner size. On a GPU the product then takes longer than the casts of its operands."""


def known_product(name: str, recipe: str, emulated: bool) -> dict[str, Any]:
    chosen, device = backend(name), "cpu" if emulated else "cuda"
    usable, reason = chosen.usable(recipe, emulated)
    if not usable:
        return {"error": reason}
    torch.manual_seed(0)
    size = SIZE[device]
    linear = torch.nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16)
    torch.nn.init.normal_(linear.weight)
    rows = torch.randn(size, size, device=device).bfloat16()
    exact = rows.double() @ linear.weight.detach().double().t()
    model = torch.nn.Sequential(linear)
    case = Case(OWN, name, recipe, emulated=emulated)
    converted = chosen.convert(model, case).model
    model = model if converted is None else converted  # type: ignore[assignment]
    precision = chosen.precision(case)

    def product() -> torch.Tensor:
        with torch.no_grad(), precision():
            result: torch.Tensor = model(rows)
        return result

    product()
    kernel = "emulation"
    if device == "cuda":
        with torch.profiler.profile() as profiler:
            product()
            torch.cuda.synchronize()
        kernel = longest([event for event in plain_events(profiler) if event.gpu])
    off = float((product().double() - exact).norm() / exact.norm())
    return {"off": off, "kernel": kernel, "cudnn": torch.backends.cudnn.version() if device == "cuda" else None}


def main(arguments: list[str]) -> None:
    try:
        answer = known_product(arguments[0], arguments[1], "emulated" in arguments[2:])
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
