"""The two arms of a case."""

from __future__ import annotations

import os
from dataclasses import replace

from pytest_fp8.arms.pool import Arm, ArmPool
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.case import Case
from pytest_fp8.plan import TwoArms
from pytest_fp8.workload import Workload


class PairArms(TwoArms):
    """The two live arms of a case: ``bf16`` is the reference."""

    def __init__(
        self,
        case: Case,
        pool: ArmPool,
        workload: str | None,
        fingerprint: str = "",
        fp8_control: str | None = None,
        reference_control: str | None = None,
    ) -> None:
        """``fp8_control``, ``reference_control``: the control that breaks the one arm or the other."""
        self.digest = case.digest(fingerprint)
        self.fp8 = make_arm(case, pool, workload, fingerprint, fp8_control, own_process=case.backend == "bf16")
        self.bf16 = make_arm(case.reference(), pool, workload, fingerprint, reference_control)
        super().__init__(case, pool, self.bf16, self.fp8)

    def case_digest(self, workload: Workload | None) -> str:
        """The hash of the case as baselines keep it. A workload's part is read from the facts of its reference arm,
        which is built if it is not yet. Raises :class:`ArmError`."""
        if workload is None:
            return self.digest
        if not self.bf16.facts:
            self.bf16.request("park")
        return self.case.digest(workload.fingerprint(self.bf16.facts["first_step"]))


def beside_another(arms: TwoArms, recipe: str, leave: tuple[str, ...]) -> TwoArms:
    """The FP8 arm as the reference, and the same arm with another recipe or with Linears left in high precision, both
    in fresh processes."""
    _, fp8 = arms.pair
    case = arms.case if recipe == arms.case.recipe else replace(arms.case, recipe=recipe, options={})
    key = f"{fp8.key} {recipe} without {' '.join(leave)}"
    other = replace(fp8, key=key, spec=replace(fp8.spec, case=case, leave=leave))
    arms.pool.renew(fp8, other)
    beside = TwoArms(arms.case, arms.pool, fp8, other)
    beside.start()
    return beside


def make_arm(
    case: Case,
    pool: ArmPool,
    workload: str | None,
    fingerprint: str,
    control: str | None = None,
    own_process: bool = False,
) -> Arm:
    """The arm of a case. Arms with one key are one process: six cases of a model share one reference.

    BF16 measured against BF16 must be two processes all the same (``own_process``), and an arm that a control breaks
    is never shared with a healthy one.
    """
    on_cpu = case.emulated
    threads = cpu_threads(case.gpus) if on_cpu else None
    spec = ArmSpec(case, "cpu" if on_cpu else "cuda", workload, threads, control)
    key = case.digest(fingerprint) + ("-twin" if own_process else "") + (f"-control-{control}" if control else "")
    return Arm(key, spec, pool)


def cpu_threads(ranks: int) -> int:
    """Threads of a process on the CPU: all cores this process may use, shared by pytest-xdist's workers, the two arms
    that train beside each other and an arm's ranks; at most 8, since tiny models gain nothing from more. On two cores
    a step of the micro model takes 40 ms with one thread and 55 with two, one of tiny 446 and 785."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // (2 * workers)) // ranks)
