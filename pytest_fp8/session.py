"""The state of one pytest session: settings, ledger, live arms; and what is written when it ends."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fp8.options import Settings
from pytest_fp8.report.ledger import Entry, Ledger

if TYPE_CHECKING:
    from pytest_fp8.arms.pool import ArmPool
    from pytest_fp8.baselines.revision import Revision
    from pytest_fp8.case import Case
    from pytest_fp8.pair import Fp8Pair
    from pytest_fp8.workload import Workload


class Session:
    """One per pytest process. Nothing here imports torch; arms start when a test first asks."""

    def __init__(self, settings: Settings, root: Path, is_worker: bool) -> None:
        self.settings, self.root, self.is_worker = settings, root, is_worker
        self.ledger = Ledger()
        self.problems: list[str] = []
        """What made the session fail although no test did."""
        self.written: list[str] = []
        self.revisions: list[Revision] = []
        """What an update found, case by case, changed or not."""
        self.notes: list[str] = []
        """Stored baselines that this run had no use for."""
        self._origin: dict[str, Any] = {}
        self.upcoming: list[Case] = []
        self._asked: dict[str, set[str | None]] = {}
        """What this session's tests ask of each case, by its id; ``None``: a test whose mark names no question."""
        self._pool: ArmPool | None = None
        self._pairs: dict[tuple[str, str, str], Fp8Pair] = {}
        self._held = ExitStack()

    def start(self) -> None:
        """Take the baselines' lock where this run will write them; raises :class:`BaselineError`."""
        if self.settings.update and not self.is_worker:
            from pytest_fp8.baselines.store import updating

            self._held.enter_context(updating(self.settings.baseline_dir))

    def selected(self, asked: list[tuple[Case, str | None, str]], whole: bool) -> None:
        """Note which cases were collected, by which tests, with which questions (``None``: the marks name none, and any
        may come), and whether nothing was left out by a path, ``-k`` or ``-m``."""
        from dataclasses import replace

        self.upcoming = list({case.id: case for case, _, _ in asked}.values())
        self.ledger.open_tests = {case.id: [] for case in self.upcoming}
        for case, question, test in asked:
            self._asked.setdefault(case.id, set()).add(question)
            self.ledger.open_tests[case.id].append(test)
        self.ledger.partial |= not whole
        for case in self.upcoming:
            if case.needs_gpu and case.backend != "bf16":
                # A baseline measured with local weights belongs to the suite in a run without them, and the reverse.
                names = {replace(case, weights=weights).id for weights in (None, "a folder")}
                self.ledger.collected = sorted({*self.ledger.collected, *names})

    def pair(self, case: Case, workload: Workload | None, test: str) -> Fp8Pair:
        """The pair of a case, its arms alive. A workload that differs in anything is another pair."""
        from pytest_fp8.arms.evidence import PairArms, make_arm
        from pytest_fp8.baselines.store import baseline_path, read_baseline
        from pytest_fp8.pair import Fp8Pair
        from pytest_fp8.workload import identity

        shipped = workload.ship(test) if workload is not None else None
        fingerprint = workload.fingerprint() if workload is not None else ""
        digest = case.digest(fingerprint)
        # A baseline's hash is the same in every process; who shares arms, each number decides, a drawn one too.
        model = identity(shipped) if shipped is not None else ""
        pair = self._pairs.get((case.id, digest, model))
        if pair is None:
            folder = self.settings.baseline_dir
            gpu = self._gpu_key() if case.needs_gpu else "emulated"
            baseline = None
            if not self.settings.update:
                baseline = read_baseline(folder, gpu, case.id, digest)
            stored = str(baseline_path(folder, gpu, case.id))
            pair = self._pairs[case.id, digest, model] = Fp8Pair(
                PairArms(case, self.pool(), shipped, fingerprint + model),
                self.settings,
                self.ledger,
                baseline,
                stored,
                digest,
                gpu,
                self.gated_cases,
                time_first=self._may_ask_speed(case),
            )
        ahead = [make_arm(c, self.pool(), None, "") for c in self._soon(case)] if workload is None else []
        pair._arms.start(ahead)
        return pair

    @property
    def gated_cases(self) -> int:
        """Cases of this session that are gated on speed: they share its false alarms. Known after collection."""
        return max(1, sum(case.asks("speedup") and self._may_ask_speed(case) for case in self.upcoming))

    def _may_ask_speed(self, case: Case) -> bool:
        return bool(self._asked.get(case.id, {None}) & {None, "speedup"})

    def pool(self) -> ArmPool:
        if self._pool is None:
            from pytest_fp8.arms.pool import ArmPool
            from pytest_fp8.gpu import detect

            self._pool = ArmPool(detect()[0])
        return self._pool

    def has_something_to_say(self) -> bool:
        """Whether the closing summary has anything in it."""
        return bool(self.ledger.entries or self.ledger.not_run or self.problems or self.written or self.notes)

    def close(self) -> None:
        """End all arms and give the lock back."""
        if self._pool is not None:
            self.ledger.seconds = self._pool.seconds
            self._pool.close()
        self._held.close()

    def finish(self, ran: bool) -> None:
        """Write baselines, candidates and the report; note what makes a session fail by itself."""
        settings, ledger = self.settings, self.ledger
        if settings.declared and ran and ledger.ran_on_gpu == 0:
            reasons = "; ".join(ledger.not_run) or "no test of this run asks anything of a GPU"
            self.problems.append(
                f"--fp8-gpu={settings.gpu} was declared and no FP8 test ran on it: {reasons}. "
                "A gate that ran nothing is not green."
            )
        if settings.update:
            self._update()
        elif settings.declared and ran and ledger.ran_on_gpu and not ledger.partial:
            self.notes += self._unused()
        if settings.report_dir is not None and ledger.entries:
            self._report(settings.report_dir)

    def _unused(self) -> list[str]:
        """The stored baselines that a whole run on a declared GPU had no use for."""
        gpu = self._gpu_key()
        stored = {path.stem for path in (self.settings.baseline_dir / gpu).glob("*.json")}
        asked = {name for name, entry in self.ledger.entries.items() if entry.decisions}
        orphaned = sorted(stored - set(self.ledger.collected))
        unexercised = sorted(stored & set(self.ledger.collected) - asked)
        lines = []
        if orphaned:
            lines.append(f"{len(orphaned)} orphaned baseline(s), of no case of this suite: {', '.join(orphaned)}")
            lines.append("  next: pytest-fp8 baselines prune")
        if unexercised:
            lines.append(
                f"{len(unexercised)} unexercised baseline(s), asked nothing in this run: {', '.join(unexercised)}"
            )
        return lines

    def _update(self) -> None:
        from pytest_fp8.baselines.revision import revise, revised
        from pytest_fp8.baselines.store import write_baseline
        from pytest_fp8.errors import Fp8Error

        for name, entry in self.ledger.entries.items():
            if not entry.metrics and not entry.errors:
                continue
            why = self._why_not_stored(name)
            if why:
                self.problems.append(f"baseline of {name} was not updated: {why}")
                continue
            old, whole = self._old(entry)
            new = self._measured(entry)
            revision = revise(old, new, whole)
            self.revisions.append(revision)
            stored = revised(old, new, revision)
            if stored is None:
                continue
            try:
                path = write_baseline(self.settings.baseline_dir, stored)
            except Fp8Error as error:
                self.problems.append(error.message)
            else:
                self.written.append(str(path))
                if "speedup" in new.metrics and stored.metrics["speedup"] is new.metrics["speedup"]:
                    self._note_launch_bound(entry)

    def _note_launch_bound(self, entry: Entry) -> None:
        """Say so where a speedup was stored that is the host's as much as the GPU's."""
        from pytest_fp8.questions.speed import launch_bound

        numbers = (entry.decisions.get("speedup") or entry.decisions.get("faster") or {}).get("numbers", {})
        waits = launch_bound(numbers["fp8_gpu_ms"], numbers["fp8_ms"]) if numbers else ""
        if waits:
            self.notes.append(
                f"baseline of {entry.case} is this host's as much as the GPU's: {waits}\n"
                "  next: store one with a larger batch; on a slower host this one's gate may fail"
            )

    def _why_not_stored(self, case: str) -> str:
        entry = self.ledger.entries[case]
        if entry.namesakes:
            return (
                f"{entry.namesakes} different models or settings were asked under this name; give each its own: "
                "@pytest.mark.fp8(name='...')"
            )
        layers = entry.decisions.get("layers")
        cut = (self.ledger.open_tests or {}).get(case)
        if cut:
            left = ", ".join(sorted(cut))
            return f"the run was cut short before all its tests had run (open: {left}); run its update again"
        if entry.errors:
            return f"its arms failed ({entry.errors[0]})"
        if layers is None or layers["verdict"] != "PASS":
            said = layers["headline"] if layers else "the layers question was not asked in this run"
            return f"FP8 was not shown to run ({said})"
        for question in ("loss", "checkpoints"):
            decision = entry.decisions.get(question)
            if decision is not None and decision["verdict"] == "FAIL":
                return f"the {question} question failed ({decision['headline']})"
        for question in ("speedup", "faster"):
            speed = entry.decisions.get(question)
            if speed is not None and speed["verdict"] == "INVALID":
                return f"the timing is invalid ({speed['headline']})"
        return self._too_coarse(entry)

    def _too_coarse(self, entry: Entry) -> str:
        """A baseline whose own noise is as large as the tolerance it would gate at."""
        measured = entry.metrics.get("speedup")
        if measured is None:
            return ""
        from pytest_fp8.baselines.inventory import too_coarse

        why = too_coarse(measured["values"], measured["tolerance"])
        return f"{why} (more of them: --fp8-processes)" if why else ""

    def _old(self, entry: Entry) -> tuple[Any, str]:
        """The stored baseline of a case, or ``None`` and why there is none to compare with."""
        from pytest_fp8.baselines.store import read_baseline
        from pytest_fp8.errors import Fp8Error

        try:
            return read_baseline(self.settings.baseline_dir, entry.gpu, entry.case, entry.case_hash), ""
        except Fp8Error as error:
            return None, f"the earlier file cannot be compared with: {error.headline}"

    def _measured(self, entry: Entry) -> Any:
        """What this run measured, as a baseline."""
        from pytest_fp8.baselines.provenance import provenance
        from pytest_fp8.baselines.store import Baseline
        from pytest_fp8.gpu import detect

        if not self._origin:
            # Once, and before the first file is written: a baseline that was just rewritten makes the tree dirty.
            self._origin = provenance(self.root, {}, self.settings.reason)
        device = detect()[0]
        described = device.describe() if device is not None and entry.gpu != "emulated" else {"name": "emulated"}
        return Baseline(entry.case, entry.case_hash, entry.gpu, entry.metrics, {**self._origin, "gpu": described})

    def _candidate(self, entry: Entry) -> Any:
        """What this run would store: its own metrics, and the stored values of questions it did not ask."""
        from dataclasses import replace

        new = self._measured(entry)
        old, _ = self._old(entry)
        origin = dict(new.provenance)
        unfit = self._why_not_stored(entry.case)
        if unfit:
            origin["unfit"] = unfit
        stored = dict(old.metrics) if old is not None else {}
        return replace(new, metrics={**stored, **new.metrics}, provenance=origin)

    def _report(self, folder: Path) -> None:
        from pytest_fp8.baselines.store import write_atomically, write_baseline
        from pytest_fp8.errors import Fp8Error

        try:
            first = next(iter(self.ledger.entries.values()))
            report = {**self.ledger.to_json(), "provenance": self._measured(first).provenance}
            write_atomically(folder / "report.json", json.dumps(report, indent=1, default=str) + "\n")
            self.written.append(str(folder / "report.json"))
            for entry in self.ledger.entries.values():
                if entry.metrics and entry.namesakes:
                    self.notes.append(f"no candidate of {entry.case}: {self._why_not_stored(entry.case)}")
                elif entry.metrics:
                    write_baseline(folder / "candidates", self._candidate(entry))
        except Fp8Error as error:
            self.problems.append(error.message)

    def _soon(self, case: Case) -> list[Case]:
        """Cases still to come that share this one's reference; under xdist none, for another worker may run them."""
        if self.is_worker:
            return []
        reference = case.reference()
        position = next((index for index, c in enumerate(self.upcoming) if c == case), len(self.upcoming))
        return [c for c in self.upcoming[position + 1 :] if c.reference() == reference and c.needs_gpu]

    def _gpu_key(self) -> str:
        from pytest_fp8.gpu import detect

        gpu, _ = detect()
        return gpu.key if gpu is not None else "none"


SESSION = pytest.StashKey[Session]()
"""Where a pytest ``Config`` keeps its session."""


def question_of(item: pytest.Item) -> str | None:
    """The question that a test's marks name, the nearest one first."""
    named = (mark.kwargs["question"] for mark in item.iter_markers("fp8") if "question" in mark.kwargs)
    return next(named, None)


def case_of(item: pytest.Item) -> Any:
    """The case a test was parametrised with, or ``None``."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("fp8_case") if callspec is not None else None
