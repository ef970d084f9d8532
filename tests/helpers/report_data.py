"""A report of invented figures, with everything that pictures show."""

from __future__ import annotations

HOSTILE = "<script>alert(1)</script>\"'&$x_{$ </svg></pre>\x1b[31m{{ 7 * 7 }}"
NAME = "model.layers.0.mlp"
LAYER = {"layer": NAME, "skipped": "", "ran": {"fprop": "fp8", "wgrad": "bfloat16"}}
NUMERICS = {
    "layer": NAME,
    "sqnr_db": {"fprop": 28.5, "wgrad": None},
    "own_sqnr_db": {"fprop": 28.6},
    "gradient_error": 0.08,
    "gradient_limit": 0.25,
}
DIFFERENCE = dict.fromkeys(("code", "headline", "what", "reference", "fp8", "cause", "next_step"), "relu") | {
    "verdict": "INVALID"
}
ARM = {"step": 120.0, "classes": {"attention": 14.0}, "roles": {"fprop fp8": 11.0}}
ACCOUNT = {
    "bf16": ARM,
    "fp8": ARM | {"step": 106.0},
    "earned_ms": 31.0,
    "casts_ms": 16.0,
    "all_else_ms": 1.0,
    "limit": 1.3,
    "grown": [{"name": "abs_max<BFloat16>", "count": 48, "milliseconds": 9.5}, {"name": "relu", "count": 1}, "x"],
}


def decision(verdict="PASS", message="", **numbers):
    return {"verdict": verdict, "headline": f"{verdict} it is", "message": message or verdict, "numbers": numbers}


def entry_of(name="1b-te-delayed", **changed):
    memory = decision(
        ratio=0.9, phases={"forward": 1.0, "backward": 2.0}, bf16_phases={"forward": 1.5, "backward": 2.5}
    )
    speedup = decision(speedup=1.13, low=1.12, high=1.14, baseline=1.12, gated_speedup=1.13, account=ACCOUNT)
    return {
        "case": name,
        "case_hash": "0",
        "gpu": "h200",
        "decisions": {"loss": decision(gap=0.001, margin=0.02), "speedup": speedup, "memory": memory},
        "metrics": {},
        "timing": {"processes": [{"bf16": [120.0, 121.0, 122.0, 120.0], "fp8": [106.0, 107.0, 106.0, 105.0]}]},
        "errors": [],
        "expected": [],
        "known": [],
        "failed": [],
        "asserted": ["loss"],
        "namesakes": 0,
        "evidence": {
            "curves": [{"seed": 0, "bf16": [5.0, 4.0, 3.0], "fp8": [5.0, None, 3.1]}],
            "layers": [LAYER],
            "numerics": [NUMERICS],
            "differences": [DIFFERENCE],
            "history": [{"date": "2026-11-20", "commit": "abc", "speedup": 1.12}],
        },
    } | changed


def report_of(*entries, reason=""):
    provenance = {"date": "2026-11-22", "commit": "abc", "dirty": False, "gpu": {"name": "NVIDIA H200"}}
    return {
        "schema": 1,
        "entries": {entry["case"]: entry for entry in entries},
        "not_run": {},
        "ran_on_gpu": 1,
        "collected": [],
        "partial": False,
        "provenance": provenance | {"libraries": {"torch": "2.11.0"}, "reason": reason},
    }
