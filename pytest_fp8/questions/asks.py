"""What several questions ask of the arms: the profile of a step, the ledgers, the products and gradients, memory."""

from __future__ import annotations

from pytest_fp8.case import ON_A_GPU, Case
from pytest_fp8.codes import R
from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking
from pytest_fp8.questions.findings import finding
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.ledger.evidence import ArmLedger, TwoLedgers
from pytest_fp8.questions.memory import MemoryEvidence, StepMemory
from pytest_fp8.questions.numerics.evidence import ArmNumerics, NumericsEvidence
from pytest_fp8.verdicts import Decision, Verdict


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


def memory_of() -> Asking[MemoryEvidence]:
    bf16, fp8 = yield Ask(REFERENCE, "memory", StepMemory), Ask(FP8, "memory", StepMemory)
    return MemoryEvidence(bf16, fp8)


def cannot(case: Case, question: str) -> Decision:
    """The case is emulated and the question one of speed or memory, or its own list of questions leaves it out."""
    emulated = case.emulated and question in ON_A_GPU
    expected = "a case on a GPU, not emulated" if emulated else f"{question!r} among the questions of the mark"
    seen = f"questions: {', '.join(case.questions)}"
    found = finding(R.NOT_ASKED_OF_THIS_CASE, expected, seen, Verdict.NOT_EXERCISED, case=case.id, question=question)
    return found.answer(question)
