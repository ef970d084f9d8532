"""What several questions ask of the arms: the profile of a step, the ledgers, the products and gradients."""

from __future__ import annotations

from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.ledger.evidence import ArmLedger, TwoLedgers
from pytest_fp8.questions.numerics.evidence import ArmNumerics, NumericsEvidence


def layers_of(arm: str) -> Asking[LayersEvidence]:
    found: LayersEvidence = yield Ask(arm, "layers", LayersEvidence)
    return found


def fp8_layers() -> Asking[LayersEvidence]:
    return layers_of(FP8)


def ledgers_of(backend: str) -> Asking[TwoLedgers]:
    reference, fp8 = yield Ask(REFERENCE, "ledger", ArmLedger), Ask(FP8, "ledger", ArmLedger)
    return TwoLedgers(reference, fp8, backend)


def reference_ledger() -> Asking[ArmLedger]:
    """Asked before the FP8 arm has its turn."""
    found: ArmLedger = yield Ask(REFERENCE, "ledger", ArmLedger)
    return found


def numerics_of() -> Asking[NumericsEvidence]:
    reference = Ask(REFERENCE, "numerics", ArmNumerics, moved=True)
    bf16, fp8 = yield reference, Ask(FP8, "numerics", ArmNumerics, moved=False)
    return NumericsEvidence(fp8, bf16)
