"""The picture of a case's layers by role, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fp8.report.numbers import columns, number
from pytest_fp8.report.page.drawing import BAD, BF16, FP8, GOOD, INK, Picture, drawing, legend_above, whole_ticks

ROLES = ("fprop", "dgrad", "wgrad", "recompute")
MARKS = {"fprop": "o", "dgrad": "s", "wgrad": "^", "recompute": "x"}
COLOURS_OF = {"fprop": FP8, "dgrad": BF16, "wgrad": GOOD, "recompute": INK}


def joined(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is known of each Linear, in the model's order: how its products ran, and what they computed."""
    nothing: dict[str, Any] = {"sqnr_db": {}, "own_sqnr_db": {}, "gradient_error": None, "gradient_limit": None}
    numerics = {each["layer"]: each for each in entry["evidence"].get("numerics", ())}
    return [nothing | numerics.get(each["layer"], {}) | each for each in entry["evidence"].get("layers", ())]


def layers(entry: Mapping[str, Any], key: str) -> Picture | None:
    found = joined(entry)
    if not any(layer["sqnr_db"] or layer["gradient_error"] is not None for layer in found):
        return None
    title = "Layers by role: SQNR of products, and error of gradients"
    with drawing(key, title, 4.2, panels=2) as drawn:
        sqnr, error = drawn.axes
        for role in ROLES:
            points = [(i, number(layer["sqnr_db"], role)) for i, layer in enumerate(found)]
            there = [(i, value) for i, value in points if value is not None]
            if there:
                filled = {i for i, _ in there if found[i]["ran"].get(role) == "fp8"}
                colour = COLOURS_OF[role]
                for inside, alpha, label in ((True, 0.9, role), (False, 0.35, f"{role}, not FP8")):
                    chosen = [(i, value) for i, value in there if (i in filled) is inside]
                    if chosen:
                        x, y = zip(*chosen, strict=True)
                        sqnr.plot(x, y, MARKS[role], ms=3, color=colour, alpha=alpha, ls="", label=label)
        shown = [(i, layer["gradient_error"], layer["gradient_limit"]) for i, layer in enumerate(found)]
        error.bar(
            [i for i, value, _ in shown if value is not None],
            [100 * value for _, value, _ in shown if value is not None],
            color=FP8,
            width=0.8,
            label="weight's gradient off BF16's",
        )
        limits = [(i, 100 * limit) for i, value, limit in shown if value is not None and limit is not None]
        if limits:
            error.plot(*zip(*limits, strict=True), "_", ms=5, color=BAD, ls="", label="its limit")
            top = max(100 * value for _, value, _ in shown if value is not None)
            error.set_ylim(0, min(1.1 * max(limit for _, limit in limits), 5 * top) or None)
        sqnr.set_ylabel("SQNR in dB")
        error.set_ylabel("%")
        error.set_xlabel("layer, in the model's order; the table below names them")
        for axes in (sqnr, error):
            axes.set_xlim(-0.8, len(found) - 0.2)
        whole_ticks(sqnr, error)
        legend_above(sqnr, error)
    reads = "A layer far below its neighbours computes something else than the recipe's casts explain."
    return Picture(title, reads, drawn.svg, columns(LAYER_COLUMNS, layer_rows(entry)))


LAYER_COLUMNS = (
    "layer",
    *(f"{role}{what}" for role in ROLES for what in ("", " SQNR dB", " own SQNR dB")),
    "gradient off",
    "limit",
    "skipped",
)


def layer_rows(entry: Mapping[str, Any]) -> list[list[Any]]:
    """One row of :data:`LAYER_COLUMNS` per layer."""
    return [
        [
            layer["layer"],
            *(
                cell
                for role in ROLES
                for cell in (layer["ran"].get(role), layer["sqnr_db"].get(role), layer["own_sqnr_db"].get(role))
            ),
            layer["gradient_error"],
            layer["gradient_limit"],
            layer["skipped"],
        ]
        for layer in joined(entry)
    ]
