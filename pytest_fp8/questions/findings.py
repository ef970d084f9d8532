"""What a check found: a verdict with the lines of its message, and the words they are made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fp8.questions.records import LayersEvidence
from pytest_fp8.verdicts import Verdict

SHOWN = 4
"""Names quoted in a message before it says how many more there are."""

Finding = tuple[Verdict, dict[str, str]]


def fail(headline: str, **lines: str) -> Finding:
    return Verdict.FAIL, {"headline": headline, **lines}


def eval_cause(evidence: LayersEvidence) -> str:
    if not evidence.in_eval:
        return ""
    return f"eval() switched FP8 off: {len(evidence.in_eval)} layers are in eval mode while the model trains"


def some(names: Any) -> str:
    ordered = list(dict.fromkeys(names)) if isinstance(names, list) else sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
