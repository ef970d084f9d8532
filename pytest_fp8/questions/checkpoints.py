"""Can I switch back? Checkpoints carried both ways between the arms. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_fp8.questions.records import Transfer
from pytest_fp8.rules.decide import LOSS_MARGIN
from pytest_fp8.verdicts import Decision, Verdict

QUESTION = "checkpoints"
SHOWN = 4
LOGITS = (0.05, 1.0)
"""Bounds of the limit on the logits' relative distance: at least 5 %, and never as far as unrelated weights (1.4).
Seen on an H200: 0.56 between the precisions of one and the same 8B weights, close to their random start."""


def logit_limit(distance_at_start: float) -> float:
    """Twice the distance that the two precisions show on one and the same weights, within :data:`LOGITS`."""
    return min(max(2 * distance_at_start, LOGITS[0]), LOGITS[1])


def check_checkpoints(transfers: Sequence[Transfer]) -> Decision:
    """Every transfer must carry every weight and, where asked, the optimizer, and training must go on as it was."""
    numbers = {
        "transfers": [
            {
                "direction": t.direction,
                "store": t.store,
                "logits": t.logit_distance,
                "limit": t.logit_limit,
                "bytes": t.saved.get("bytes"),
                "resumed": list(t.resumed_losses),
                "source": list(t.source_losses),
                "scaling_state": len(t.saved.get("scaling_state", [])),
                "frozen": t.saved.get("frozen", 0),
            }
            for t in transfers
        ]
    }
    for transfer in transfers:
        found = _transfer(transfer)
        if found is not None:
            headline, lines = found
            where = f"{transfer.direction} through {transfer.store}: "
            return Decision(QUESTION, Verdict.FAIL, where + headline, numbers=numbers, **lines)
    ways = ", ".join(f"{t.direction} ({t.store}{', resumed' if t.with_optimizer else ''})" for t in transfers)
    keys = len(transfers[0].saved["keys"]) if transfers else 0
    frozen = transfers[0].saved.get("frozen", 0) if transfers else 0
    what = f"{keys} adapter weights (of {frozen} frozen tensors none is stored)" if frozen else f"{keys} weights"
    return Decision(QUESTION, Verdict.PASS, f"{what} bit-equal after {ways}", numbers=numbers)


def _transfer(t: Transfer) -> tuple[str, dict[str, str]] | None:
    fp8 = [dtype for dtype in t.saved["on_disk"] if "F8" in dtype or "float8" in dtype]
    if fp8:
        return "weights were stored in FP8", {
            "expected": "high-precision weights on disk",
            "seen": f"{t.saved['on_disk']}",
            "cause": "the FP8 copies were saved in place of the master weights",
            "next_step": "save the parameters, not the quantized workspaces",
        }
    loaded = t.loaded
    untied = {**t.saved.get("untied", {}), **loaded.get("untied", {})}
    lost = [name for name in untied if name in loaded["missing"] or name not in loaded.get("digests", {})]
    if lost:
        return "a weight that was tied is one of its own after the conversion", {
            "expected": f"{lost[0]} to stay one with {untied[lost[0]]}",
            "seen": f"{lost[0]} has values of its own in FP8, and no place beside {untied[lost[0]]} in BF16",
            "cause": "the conversion copied weights into new layers: the model was untied",
            "next_step": "tie again after the conversion: model.tie_weights()",
        }
    for name, headline, cause in (
        ("missing", "weights are missing from the checkpoint", "keys were renamed by a wrapper, or not saved"),
        ("unexpected", "the checkpoint has keys with no home", "a prefix or scaling state that nobody accounted for"),
        ("wrong_shape", "weights have another shape", "fused or split layers"),
    ):
        if loaded[name]:
            return headline, {
                "expected": f"all {len(t.saved['keys'])} weights, each with one home",
                "seen": _some(loaded[name]),
                "cause": cause,
                "next_step": "compare the keys of both arms' state dicts",
            }
    changed = [key for key, digest in t.saved["digests"].items() if loaded["digests"].get(key) != digest]
    if changed and t.saved.get("wrapped"):
        return "the checkpoint was loaded into nothing", {
            "expected": "bit-equal weights after loading",
            "seen": f"{len(changed)} weights are not the stored ones; on disk: {_some(t.saved['wrapped'])}",
            "cause": "keys carry a wrapper's prefix (_orig_mod., module.) and a load that is not strict drops them",
            "next_step": "load with strict=True, and save the module inside the wrapper",
        }
    if changed:
        return "weights changed on the way", {
            "expected": "bit-equal weights after loading",
            "seen": f"{len(changed)} differ: {_some(changed)}",
            "cause": "a cast on the way, or a load that silently did nothing",
            "next_step": "load with strict=True",
        }
    if t.with_optimizer and t.saved["optimizer_digests"] != loaded.get("optimizer_digests"):
        have, want = len(loaded.get("optimizer_digests", {})), len(t.saved["optimizer_digests"])
        return "the optimizer's state did not arrive", {
            "expected": f"{want} optimizer tensors, bit-equal",
            "seen": f"{have} tensors" + (", some changed" if have == want else ""),
            "cause": "weights were loaded and the optimizer was not",
            "next_step": "load both before the next step",
        }
    if not t.logit_distance <= t.logit_limit:  # also true of NaN
        return "the loaded model computes something else", {
            "expected": f"logits within {t.logit_limit:.3f} of the source's (relative L2)",
            "seen": f"{t.logit_distance:.3f}",
            "cause": "stale scaling state, or buffers that were not carried",
            "next_step": "reset scaling state after loading",
        }
    if t.with_optimizer:
        gap = sum(t.resumed_losses) / len(t.resumed_losses) - sum(t.source_losses) / len(t.source_losses)
        # As in the loss question a share of losses below 1; of the largest, which no change of sign brings to zero.
        limit = LOSS_MARGIN[1] * min(1.0, max(abs(loss) for loss in t.source_losses))
        if not abs(gap) <= limit or not math.isfinite(gap):
            return "training does not go on where the source was", {
                "expected": f"the source's losses {_losses(t.source_losses)} within {limit:.3g} on average",
                "seen": f"{_losses(t.resumed_losses)} ({gap:+.3g})",
                "cause": "the optimizer or the scaling state restarted from nothing",
                "next_step": "check that optimizer state and step count were loaded",
            }
    return None


def _losses(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
