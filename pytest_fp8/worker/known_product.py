"""One FP8 product of known operands: ``python -m pytest_fp8.worker.known_product BACKEND RECIPE [emulated]``.

The last line of its output is JSON: ``off``, the error against the exact product as a fraction; or ``error``, why there
was no product.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from pytest_fp8.backends import backend
from pytest_fp8.case import OWN, Case

SIZE = 256
"""Rows, columns and inner size."""


def known_product(name: str, recipe: str, emulated: bool) -> dict[str, Any]:
    chosen, device = backend(name), "cpu" if emulated else "cuda"
    usable, reason = chosen.usable(recipe, emulated)
    if not usable:
        return {"error": reason}
    torch.manual_seed(0)
    linear = torch.nn.Linear(SIZE, SIZE, bias=False, device=device, dtype=torch.bfloat16)
    torch.nn.init.normal_(linear.weight)
    rows = torch.randn(SIZE, SIZE, device=device).bfloat16()
    exact = rows.double() @ linear.weight.detach().double().t()
    model = torch.nn.Sequential(linear)
    case = Case(OWN, name, recipe, emulated=emulated)
    converted = chosen.convert(model, case).model
    model = model if converted is None else converted  # type: ignore[assignment]
    precision = chosen.precision(case)
    with torch.no_grad(), precision():
        product = model(rows)
    return {"off": float((product.double() - exact).norm() / exact.norm())}


def main(arguments: list[str]) -> None:
    try:
        answer = known_product(arguments[0], arguments[1], "emulated" in arguments[2:])
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
