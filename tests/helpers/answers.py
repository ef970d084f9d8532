"""What one rank of an arm answers, by hand: of its curve and of its layers."""

from __future__ import annotations


def curve(losses=(3.0, 2.0), norms=(1.0, 0.5), data=1, fp8=6, other=1, weights=None, **course):
    counts = {"forward": {"fp8": fp8, "other": other}}
    return {
        "losses": list(losses),
        "gradient_norms": list(norms),
        "data": data,
        "weights": weights or {},
        "course": {"rates": [[1e-3]], "stepped": [1], "state": {}, "left": [], "alone": {}, **course},
        "movement": {"w": {"elements": 8, "moved": 0.5, "reached": 1.0}},
        "first_products": counts,
        "last_products": counts,
        "calls": {"fp8": [fp8], "other": [other], "looks": {}},
    }


def layers(kinds=("fp8", "fp8", "bfloat16"), busy=10.0, called=("a",), **changes):
    alike = {key: ["a"] for key in ("originals", "converted", "skipped", "live_fp8", "kinds", "in_eval")}
    return {
        **alike,
        "calls": [{"name": name} for name in called],
        "dropped_behaviour": {},
        "switches": {},
        "recipes": {"a": {"recipe": "tensorwise"}},
        "products": [{"phase": "forward", "kind": kind} for kind in kinds],
        "milliseconds": {"busy": busy},
        "step_ms": [busy + 1],
        "busy_ms": [busy],
        "compute_ms": [busy - 2],
        "collectives": [[("all-gather", 2.0)]],
        "wire": [{"operation": "all-gather", "milliseconds": busy / 2}],
        "rest": [{"name": "copy", "count": 1, "milliseconds": busy}],
        "exposed_ms": busy / 10,
        "waits": {"cudaStreamSynchronize": round(busy)},
        "stale_amax": [],
        **changes,
    }
