"""Does scaling state come back where FP8 goes on in FP8? Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pytest_fp8.questions.checkpoints.evidence import Scales, Transfer
from pytest_fp8.questions.findings import some

SCALES_EXPECTED = "{tensors} tensors of scaling state bit-equal after dcp.save(), dcp.load() and load_state_dict()"


def lost_scales(t: Transfer) -> dict[str, Any] | None:
    """Scaling state that is lost without a word. An error of the library is loud enough: :func:`words_on_scales`."""
    scales = t.scales
    if scales is None or scales.failed:
        return None
    headline, cause = (
        "scaling state is lost where FP8 goes on in FP8",
        "load_state_dict() does not take it, or a part of it is not stored",
    )
    lost = _changed(scales.stored, scales.loaded)
    if not lost:
        headline, cause = (
            "a new model loses the scaling state that it loads",
            "layers do not take it before their first step",
        )
        lost = _changed({name: scales.stored[name] for name in scales.fresh if name in scales.stored}, scales.fresh)
    as_new = sum(scales.reset.get(name) == scales.loaded.get(name) for name in lost)
    seen = f"{len(lost)} differ, {as_new} of them as in a model without a step: {some(lost)}"
    given = {"tensors": len(scales.stored), "headline": headline, "cause": cause, "seen": seen}
    return given if lost else None


def words_on_scales(scales: Scales | None) -> list[str]:
    """What a person should know of it where nothing fails, each in a few words."""
    if scales is None or not scales.stored:
        return []
    if scales.failed:
        return [f"scaling state does not come back from FP8 to FP8 through dcp: {scales.failed}"]
    if scales.stored == scales.reset:
        return ["scaling state is that of a model without a step, so that nothing is known of its way back"]
    said = [f"{len(scales.stored)} tensors of scaling state bit-equal from FP8 to FP8 (dcp)"]
    others = [name for name, digest in scales.stored.items() if scales.loaded.get(name) != digest]
    if others:
        said = [f"ranks keep scaling state that differs, and all have one rank's after a load: {some(others)}"]
    if scales.refused:
        said.append(f"load_state_dict() refuses scaling state until that is allowed: {scales.refused.rstrip('.')}")
    if scales.no_place:
        said.append(
            f"{scales.no_place} layers have no place for scaling state before their first step: dcp.load() into the "
            "state dict of a new model ends in a size mismatch; read it with the sizes of the checkpoint"
        )
    return said


def _changed(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What holds now neither its own bits nor those of another rank: a store keeps one rank's copy."""
    of_any_rank: dict[str, set[Any]] = {}
    for name, digest in stored.items():
        of_any_rank.setdefault(_without_rank(name), set()).add(digest)
    return [name for name in stored if now.get(name) not in of_any_rank[_without_rank(name)]]


def _without_rank(name: str) -> str:
    return re.sub(r"^rank \d+: ", "", name)
