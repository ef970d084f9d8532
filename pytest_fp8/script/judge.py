"""What is said of two runs of a user's script: FP8 is on in the one, both do the same work, losses are sound. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_fp8.codes import D, R, W
from pytest_fp8.plan import FP8, Ask, Asking
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.layers.check import LayersFigures, less_than_stored
from pytest_fp8.questions.ledger.compare import find_in_ledger
from pytest_fp8.questions.ledger.evidence import ArmLedger, TwoLedgers
from pytest_fp8.questions.loss.check import (
    constant,
    curves_equal,
    explain_gap,
    figures_of,
    judge_gap,
    not_finite,
)
from pytest_fp8.questions.loss.evidence import LossEvidence
from pytest_fp8.recipes import FPROP
from pytest_fp8.script.command import LEAST_SEEDS
from pytest_fp8.verdicts import Decision, Finding, Verdict, passed
from pytest_fp8.watch.judge import OFF, ON

LOSES_FP8 = (W.CONVERTED_TOO_LATE, W.STEPPED_AROUND, W.RECOMPUTED_OTHERWISE)
"""Findings of ``watch`` with which FP8 is not what it was meant to be. Its others are said beside a PASS."""
Presence = Mapping[str, Any]
"""What ``pytest-fp8 watch`` says of one run, as docs/watch.md describes a training."""


def in_common(ledgers: TwoLedgers) -> TwoLedgers:
    """The ledgers with the weights that both arms have under one name: FP8 layers of a library may name their own."""
    shared = ledgers.reference.before.keys() & ledgers.fp8.before.keys()

    def kept(arm: ArmLedger) -> ArmLedger:
        weights = {name: weight for name, weight in arm.before.items() if name in shared}
        members = {name: index for name, index in arm.optimizer.members.items() if name in shared}
        return replace(arm, before=weights, after=weights, optimizer=replace(arm.optimizer, members=members))

    return replace(ledgers, reference=kept(ledgers.reference), fp8=kept(ledgers.fp8))


# -- is FP8 on -------------------------------------------------------------------------------------------------------


def presence_alone() -> Asking[Decision]:
    """Whether FP8 is on in a run that no BF16 run stands beside."""
    fp8 = yield Ask(FP8, "presence")
    return check_presence({**fp8, "verdict": OFF}, fp8)


def check_presence(
    bf16: Presence,
    fp8: Presence,
    ledgers: TwoLedgers | None = None,
    least: float = 0.0,
    stored: Mapping[str, float] | None = None,
) -> Decision:
    """FP8 is on in the one run and off in the other, in as much of the work as the mark and the baseline say, and both
    do the same work. ``least``: the mark's share."""
    figures = _figures(fp8)
    found = (
        _not_seen(bf16, fp8)
        or _in_both(bf16)
        or _off(fp8)
        or (find_in_ledger(ledgers, "layers") if ledgers is not None else None)
        or _too_little(figures.fp8_share, least)
        or less_than_stored(figures, stored or {})
        or _other_precision(bf16, fp8)
    )
    if found is not None:
        return found.answer("layers", figures)
    notes = [f"{note['text']} [{note['code']}]" for note in fp8["notes"]]
    roles = ", ".join(f"{role} {share:.0%}" for role, share in fp8["roles"].items())
    said = f"{figures.converted} of {figures.linears} Linears in FP8, {figures.fp8_share:.1%} of the step's GEMM FLOPs"
    if ledgers is not None:
        notes = [compared(ledgers), *notes]
    return passed("; ".join([f"{said} ({roles})", *notes])).answer("layers", replace(figures, notes=notes))


def compared(ledgers: TwoLedgers) -> str:
    """What of the work was compared, in words: a PASS says what it rests on."""
    arm, count = ledgers.fp8, len(ledgers.fp8.before)
    inputs = "the model's first inputs" if arm.batch else "not its inputs, which a compiled model does not show"
    return f"alike in both runs: {count} weights before the first step, {arm.optimizer.kind}, switches, {inputs}"


def _figures(fp8: Presence) -> LayersFigures:
    classes = fp8["classes"]
    count, inside = 0, 0.0
    roles: dict[str, dict[str, int]] = {}
    for each in classes:
        kinds = each["products"].get(FPROP, {})
        share = kinds.get("fp8", 0) / max(1, sum(kinds.values()))
        count, inside = count + len(each["layers"]), inside + share * len(each["layers"])
        for role, ran in each["products"].items() if share else ():
            told = roles.setdefault(role, {"expected": 0, "fp8": 0})
            told["expected"] += sum(ran.values())
            told["fp8"] += ran.get("fp8", 0)
    return LayersFigures(
        linears=count,
        converted=round(inside),
        fp8_share=fp8["fp8_share"] or 0.0,
        roles=roles,
        skipped={},
    )


def _not_seen(bf16: Presence, fp8: Presence) -> Finding | None:
    for name, told in (("BF16", bf16), ("FP8", fp8)):
        if told["verdict"] not in (ON, OFF):
            return Finding(
                W(told["code"]),
                Verdict.INCONCLUSIVE,
                f"the products of the {name} run could not be seen",
                expected="matrix products of its layers in a profiled step",
                seen=told["reason"],
                next_step="pytest-fp8 watch -- COMMAND shows what can be seen of it",
            )
    return None


def _in_both(bf16: Presence) -> Finding | None:
    if bf16["verdict"] == OFF:
        return None
    return Finding(
        R.BUILT_IN_FP8,
        Verdict.INVALID,
        "the BF16 run multiplies in FP8, too",
        expected="no product in FP8 without the words of fp8=",
        seen=f"{bf16['fp8_share']:.1%} of its FLOPs in FP8; in force: {'; '.join(bf16['in_force']) or 'nothing named'}",
        cause="FP8 is switched on by the command, a file or a variable that both runs have",
        next_step="words that switch it off in bf16=[...]",
    )


def _off(fp8: Presence) -> Finding | None:
    notes = [note for note in fp8["notes"] if W(note["code"]) in LOSES_FP8]
    if fp8["verdict"] == ON and not notes:
        return None
    why = (notes or fp8["notes"] or [{"text": "", "next": ""}])[0]
    return finding(
        W(why["code"]) if fp8["verdict"] == ON else W.FP8_OFF,
        "products of the layers in FP8, as the words of fp8= ask for",
        f"{fp8['fp8_share'] or 0.0:.1%} of the FLOPs in FP8; asked: {some(list(fp8['asked'])) or 'nothing named'}"
        f"; in force: {'; '.join(fp8['in_force']) or 'nothing named'}",
        cause=why["text"],
        next_step=why["next"],
    )


def _other_precision(bf16: Presence, fp8: Presence) -> Finding | None:
    """Forward products of layers of one size have the same precisions in both runs, but where FP8 takes their place."""
    before = {(each["in"], each["out"]): {*each["products"].get(FPROP, ())} for each in bf16["classes"]}
    for each in fp8["classes"]:
        theirs = {*each["products"].get(FPROP, ())}
        ours = before.get((each["in"], each["out"]), theirs)
        if theirs - ours - {"fp8", "mixed"} or not (ours <= theirs or theirs & {"fp8", "mixed"}):
            expected, seen = (", ".join(sorted(kinds)) for kinds in (ours, theirs))
            about = some(list(each["layers"]))
            return finding(D.OTHER_PRECISION, f"as in the BF16 run: {expected}", seen, Verdict.INVALID, about=about)
    return None


def _too_little(share: float, least: float) -> Finding | None:
    if share >= least:
        return None
    return finding(W.BELOW_SHARE, f"at least {least:.0%} of the FLOPs of matrix products", f"{share:.1%}")


# -- losses ----------------------------------------------------------------------------------------------------------


def check_losses(evidence: LossEvidence) -> Decision:
    """The losses are finite, move, and are not bit-equal in both runs. Of a gap a verdict needs several seeds."""
    figures = figures_of(evidence)
    if found := not_finite(evidence) or constant(evidence) or curves_equal(evidence):
        return found.answer("loss", figures)
    if len(evidence.fp8) < LEAST_SEEDS:
        said = f"losses of {figures.steps} steps are finite and not bit-equal; FP8 ends {figures.gaps[0]:+.4f} off BF16"
        return passed(f"{said}, which one seed does not judge: seed=[...] in the mark does").answer("loss", figures)
    gap = judge_gap(evidence)
    figures = replace(figures, margin=gap.margin, gap=gap.gap, bound=gap.bound)
    return explain_gap(gap, evidence).answer("loss", figures)
