"""Runs controls: gives each its broken arm, and asks the question that must find it.

Nothing of it lands in the session's record, and no baseline is ever written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from controls.control import Control, Outcome
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.baselines.store import Folder, read_baseline, source_of
from pytest_fp8.case import Case
from pytest_fp8.errors import ArmError
from pytest_fp8.options import Settings
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.report.record import CaseNotes, Notes
from pytest_fp8.script.command import Script
from pytest_fp8.script.pair import Fp8Script
from pytest_fp8.shipping import identity
from pytest_fp8.workload import Workload


class ControlRunner:
    """Runs controls, and healthy cases as controls are run. ``pool`` gives the session's own, so that no arm is another
    process that disturbs it."""

    def __init__(self, settings: Settings, pool: Callable[[], ArmPool], gpu: str = "none") -> None:
        self._settings = replace(settings, reason="", report_dir=None, strict=False)
        self._pool, self._gpu = pool, gpu

    def run(self, control: type[Control]) -> Outcome:
        """Raises :class:`ArmError` where an arm fails that none of its control is to end: it catches nothing."""
        if control.case is None:
            return control.ask(None)
        broken = dict.fromkeys(control.breaks, control.path())
        try:
            if control.script is not None:
                return control.ask(self.script_pair(control.case, control.script, broken))
            return control.ask(self.pair_of(control.case, control.workload, broken))
        except ArmError as error:
            if control.ends_arms:
                return Outcome.of(control, error)
            raise

    def script_pair(self, case: Case, script: Script, broken: Mapping[str, str]) -> Fp8Script:
        """Both runs of a script. Those that ``broken`` does not name are shared by all controls of its command."""
        shared = hashlib.sha256("\0".join(script.command).encode()).hexdigest()[:16]
        arms = PairArms(case, self._pool(), script.to_text(), shared, broken.get("fp8"), broken.get("bf16"))
        arms.start()
        pair = Fp8Script(arms, self._settings, CaseNotes(Notes(), case.id, arms.digest), None, "")
        pair.script = script
        return pair

    def pair_of(self, case: Case, own: Workload | None = None, broken: Mapping[str, str] | None = None) -> Fp8Pair:
        """The pair of a case, its decisions noted nowhere. ``broken``: arm (``fp8``, ``bf16``) -> path of a control."""
        broken = broken or {}
        workload = own.ship("a control") if own is not None else None
        model = identity(workload) if workload is not None else ""
        arms = PairArms(case, self._pool(), workload, model, broken.get("fp8"), broken.get("bf16"))
        digest = arms.case_digest(own)
        baseline = None if case.emulated else read_baseline(self._source(), self._gpu, case.id, digest)
        arms.start()
        return Fp8Pair(arms, self._settings, CaseNotes(Notes(), case.id, digest), baseline, "")

    def _source(self) -> Folder:
        return source_of(self._settings.baseline_dir)
