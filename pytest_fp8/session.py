"""The life of one pytest session with FP8 in it: what its hooks do from the first case to the closing summary.

One :class:`Session` per pytest process is registered as a plugin of its own, so pytest calls its methods. Nothing here
imports torch; arms start when a test first asks (:mod:`pytest_fp8.pairs`).
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fp8 import gpu as gpus
from pytest_fp8.baselines.provenance import Origin
from pytest_fp8.codes import R
from pytest_fp8.ending import Endings, when_parent_ends
from pytest_fp8.errors import Fp8Error, first_line, refuse
from pytest_fp8.items import arrange, case_of, check_mark, check_pair, failed, question_of
from pytest_fp8.options import Settings
from pytest_fp8.pairs import Pairs
from pytest_fp8.plain import from_plain
from pytest_fp8.report.progress import Progress, follow
from pytest_fp8.report.record import (
    JOURNAL,
    SCHEMA,
    Began,
    Closing,
    Collected,
    Ended,
    Notes,
    Record,
    Seconds,
    plain_line,
)
from pytest_fp8.verdicts import SHOWN_AS

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_fp8.case import Case

RUNNING = pytest.StashKey[bool]()
"""Whether a test's function is being called."""
CANNOT = pytest.StashKey[str]()
"""Why a test that a declared GPU must run cannot."""


class Session:
    """What a pytest process knows while its tests run. Raises :class:`Fp8Error` where settings cannot be honoured."""

    def __init__(self, settings: Settings, config: pytest.Config) -> None:
        self.settings, self.config, self.root = settings, config, config.rootpath
        self.is_worker = hasattr(config, "workerinput")
        self.runs = not config.getoption("collectonly")
        """Whether tests are not only collected."""
        self.said, self.told, self.endings = Closing(), Notes(), Endings()
        self.progress: Progress | None = None
        self._held = ExitStack()
        self._origin: dict[str, Any] = {}
        self._news: list[dict[str, Any]] = []
        """Lines that the next report takes along."""
        self._part = False
        """Whether something was deselected."""
        report, writes = settings.report_dir, self.runs and not self.is_worker
        self.record = Record(report / JOURNAL if report is not None and writes else None, self._begins)
        self.pairs = Pairs(settings, self.root, self.told, self._base(), self._held)
        if writes:
            self._require_places()

    # -- the start ------------------------------------------------------------------------------------------------

    def _base(self) -> str:
        """Base's commit, empty without one: what its name means may change while tests run."""
        if not (self.runs and self.settings.base):
            return ""
        from pytest_fp8.arms.environment import commit_of

        return commit_of(self.settings.base, self.root)

    def _require_places(self) -> None:
        """See that the report can be written, and baselines where they are updated: a run of hours must not learn at
        its end that nothing can be."""
        report, baselines = self.settings.report_dir, self.settings.baseline_dir
        if report is not None and report.resolve().is_relative_to(baselines.resolve()):
            refuse(
                R.REPORT_AMONG_BASELINES,
                "the report is to be written into the folder of the baselines",
                expected="folders of their own: what is below the baselines' folder is read as baselines",
                seen=f"--fp8-report={report}, and baselines in {baselines}",
            )
        for option, folder in (("report", report), ("baselines", baselines if self.settings.update else None)):
            try:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    with tempfile.TemporaryFile(dir=folder):
                        pass
            except OSError as error:
                refuse(
                    R.NOT_WRITABLE,
                    f"the {option} cannot be written to {folder}",
                    expected="a folder that exists or can be made, and in which files can be made",
                    seen=f"{type(error).__name__}: {error}",
                    next_step=f"another folder: --fp8-{option}=DIR, or fp8_{option} in the ini file",
                )

    def pytest_unconfigure(self) -> None:
        """End all arms, once nothing is written any more."""
        self.pairs.end()
        self._held.close()
        self.endings.give_back()

    # -- collection -----------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        arrange(items)

    def pytest_deselected(self) -> None:
        self._part = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        asked = {item.nodeid: (case, question_of(item)) for item in session.items if (case := case_of(item))}
        if not asked:
            return
        self.pairs.collected(list(asked.values()))
        stored = {case.id for case in self.pairs.cases if case.needs_gpu and case.backend != "bf16"}
        whole = all(os.path.isdir(argument) for argument in self.config.args) and not self._part
        tests = {test: case.id for test, (case, _) in asked.items()}
        self._news.append(plain_line(Collected(tests, sorted(stored), not whole)))
        self.endings.take()
        if self.is_worker:
            # Where its controller is killed, xdist itself lets the test run on for 5 s, and longer in an arm's answer.
            when_parent_ends(signal.SIGTERM)
        else:
            self.record.add(self._lines())
        self.progress = follow(self.config)
        if self.progress is not None:
            self.pairs.waiting = self.progress.waiting

    # -- each test ------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.told.begin(item.nodeid)
        check_mark(item, self.settings)
        case = case_of(item)
        if self.progress is not None:
            self.progress.test(item.name if case is None else case.id, question_of(item))
        if case is None:
            return
        from pytest_fp8.markers import why_not

        reason, failure = why_not(case, self.settings, self.pairs.cases)
        if failure:
            item.stash[CANNOT] = reason
            needs = f"everything that case {case.id} needs, on the declared GPU"
            raise failed(Fp8Error(R.CANNOT_RUN_HERE, reason, expected=needs))
        if reason:
            # As pytest's own skip marks do: the summary names the test's line, not this one.
            raise pytest.skip.Exception(reason, _use_item_location=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        pyfuncitem.stash[RUNNING] = True
        try:
            result = yield
        finally:
            pyfuncitem.stash[RUNNING] = False
        check_pair(pyfuncitem, self.settings)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        # Before a test ends pytest asks for reports of its subtests. What these asked counts with the test.
        if (case := case_of(item)) and not item.stash.get(RUNNING, False):
            self._tell(item, case, report)
        return report

    def _tell(self, item: pytest.Item, case: Case, report: Any) -> None:
        """Put what the test was told on its report."""
        ended = [plain_line(self._ended(item, case, report))] if report.when == "call" or not report.passed else []
        report.fp8 = [*self._lines(with_seconds=report.when == "teardown"), *ended]
        if report.when == "call":
            from pytest_fp8.report.files import properties, told_verdict

            asked = list({each.question: each for each in self.told.answers}.values())
            report.fp8_verdict = verdict = told_verdict(report, asked)
            # JUnit writes them as the test's properties.
            found = properties(case.id, verdict, asked)
            item.user_properties += found
            report.user_properties += found

    def _lines(self, with_seconds: bool = False) -> list[dict[str, Any]]:
        """What no report, and not the record, has taken."""
        lines = [*self._news, *self.told.take()]
        self._news.clear()
        seconds = self.pairs.seconds() if with_seconds else {}
        return [*lines, plain_line(Seconds(**seconds))] if seconds else lines

    def _ended(self, item: pytest.Item, case: Case, report: Any) -> Ended:
        """How a test came to its end. One that is expected to fail ran where it asked its arms something."""
        answers, cannot = self.told.answers, item.stash.get(CANNOT, "")
        known, reason = report.skipped and hasattr(report, "wasxfail"), cannot
        if known:
            reason = first_line(report.wasxfail.removeprefix("reason: "), 300) or "expected to fail"
        elif report.skipped:
            said = report.longrepr
            reason = str(said[2] if isinstance(said, tuple) else said).removeprefix("Skipped: ")
        ran = not cannot and (not report.skipped or bool(answers))
        # On a declared GPU every emulated test is skipped.
        counts = report.when != "teardown" and (case.needs_gpu or not self.settings.declared)
        outcome = "known" if known and (answers or report.when == "call") else report.outcome
        return Ended(item.nodeid, case.id, outcome, reason, ran if counts else None, case.needs_gpu)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The same for a test of this process and for one of a worker, whose controller this is."""
        if not self.is_worker:
            self.record.add(getattr(report, "fp8", ()))

    def pytest_runtest_logfinish(self) -> None:
        """Leaves the arms the GPU memory of a model that the test held in this process."""
        if (torch := gpus.torch_in_use()) is not None:
            gc.collect()
            torch.cuda.empty_cache()

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        if getattr(report, "when", "") == "call" and report.passed:
            return SHOWN_AS.get(getattr(report, "fp8_verdict", ""))
        return None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self) -> None:
        self.endings.take()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """With ``-n`` and no ``--dist``: on a declared GPU the tests of a case go to one worker."""
        if not self.settings.declared or config.getoption("dist") != "load":
            return None
        from pytest_fp8.xdist import by_case

        return by_case(config, log)

    # -- the end --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except KeyboardInterrupt as error:
            if self.is_worker:
                # Nobody sees its terminal, for which pytest would read the source of every frame.
                raise error.with_traceback(None) from None
            raise
        finally:
            # Ctrl-C and signals come out here too, before pytest formats where they came: the GPU is free a second
            # sooner.
            self.endings.ignore()
            if not self.is_worker:
                # As of a test that was interrupted.
                self.record.add(self._lines(with_seconds=True))
                if self.runs and self.record.lines:
                    from pytest_fp8.report.files import add_rows

                    add_rows(self.config, self.record)
            self.said.notes += self.pairs.end()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        interrupted = session.exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        if session.exitstatus == pytest.ExitCode.INTERRUPTED and self.config.pluginmanager.has_plugin("dsession"):
            from pytest_fp8.xdist import end_workers

            end_workers(self.config)
        if self.is_worker or not self.runs:
            return
        self._finish(interrupted)
        if self.said.problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.record.entries or self.record.not_run or self.said:
            from pytest_fp8.report.terminal import write_summary

            write_summary(terminalreporter, self.record, self.said, self.settings.declared)

    def origin(self) -> dict[str, Any]:
        """Where and with what this session measures. Looked up once, for git may take seconds, and before the first
        file is written: a report may be kept in git, too."""
        if not self._origin:
            from pytest_fp8.baselines.provenance import provenance

            gpu = gpus.detect()[0]
            measured_on = gpu.describe() if gpu is not None else {"name": "emulated" if self.record.entries else "none"}
            self._origin = provenance(self.root, measured_on, self.settings.reason, self.settings.baseline_dir)
        return self._origin

    def _begins(self) -> Began:
        origin, cases = self.origin(), self.pairs.cases
        # An emulated case used no GPU.
        gpu = {"name": "emulated"} if cases and not any(case.needs_gpu for case in cases) else origin["gpu"]
        return Began(SCHEMA, from_plain(Origin, {**origin, "gpu": gpu}))

    def _finish(self, interrupted: bool) -> None:
        """Write baselines and the report; note what makes a session fail by itself."""
        settings, record, said = self.settings, self.record, self.said
        nothing = "" if interrupted else self._ran_nothing()
        gated = settings.declared and record.ran_on_gpu
        if nothing:
            said.problems.append(f"{R.NOTHING_RAN}: {nothing}. A gate that ran nothing is not green.")
        elif settings.base:
            self._note_base()
        if gated:
            self._note_unanswered()
        elif not settings.declared and not settings.strict:
            from pytest_fp8.report.terminal import passed_without

            said.notes += passed_without(record.asserted())
        if settings.report_dir is not None and record.lines:
            # Before the first file is written.
            self.origin()
        if settings.update:
            self._update(interrupted)
        elif gated:
            from pytest_fp8.baselines.check import presence
            from pytest_fp8.baselines.store import Folder

            problems, notes = presence(record, Folder(settings.baseline_dir), self.pairs.gpu_key)
            said.problems += problems
            said.notes += notes
        said.notes += [
            f"{R.EXCEPTION_CAUGHT}: {each} is FAIL, and no test failed with it: its exception was caught"
            for each in record.swallowed()
        ]
        # Last: the report has what made the session fail.
        # One that asked nothing, as for a mistyped path, leaves the report of an earlier session.
        report = settings.report_dir
        if report is not None and (record.lines or (said.problems and not (report / JOURNAL).is_file())):
            self._write_report(report, finished=not (interrupted or record.open_tests))

    def _ran_nothing(self) -> str:
        """Why a gate, or a session under ``--fp8-strict``, is red although no test failed; empty where it is not."""
        settings, record = self.settings, self.record
        reasons = "; ".join(record.not_run)
        if settings.declared and not record.ran_on_gpu:
            reasons = reasons or "no test of this run asks anything of a GPU"
            return f"--fp8-gpu={settings.gpu} was declared and no FP8 test ran on it: {reasons}"
        if settings.strict and reasons and not settings.declared and not record.ran:
            return f"no FP8 test ran under --fp8-strict: {reasons}"
        return ""

    def _note_base(self) -> None:
        """Which commit was timed beside this one, or that none was: ``assert_speedup()`` alone asks it."""
        settings, ran = self.settings, self.record.ran_on_gpu
        answers = (each for row in self.record.entries.values() for each in row.decisions.values())
        if any(each.numbers.get("base") for each in answers):
            own = f"those in {settings.baseline_dir.name}, since it has none there"
            told = f"commit {self.pairs.base_commit[:12]}; stored baselines: {'its own' if self.pairs.at_base else own}"
            self.said.notes.append(f"timed beside the base {settings.base}: {told}")
            return
        why = "no test that ran asked assert_speedup(), or it had no answer" if ran else "no FP8 test ran on a GPU"
        # Only under --fp8-strict, and where a GPU answered: a job's environment may name a base for steps of all kinds.
        said = self.said.problems if settings.strict and ran else self.said.notes
        said.append(f"{R.BASE_NOT_TIMED}: nothing was timed beside the base {settings.base}: {why}")

    def _note_unanswered(self) -> None:
        from pytest_fp8.baselines.provenance import ci_variable
        from pytest_fp8.report.terminal import unanswered

        gpu = self.pairs.gpu_key + (f" at base {self.settings.base}" if self.pairs.at_base else "")
        problems, notes = unanswered(self.record.asserted(), gpu=gpu, in_ci=bool(ci_variable(os.environ)))
        # Under --fp8-strict its test fails.
        said = self.said.notes if self.settings.strict else self.said.problems
        said += problems
        self.said.notes += notes

    def _update(self, interrupted: bool) -> None:
        from pytest_fp8.baselines.update import update_baselines

        said = self.said
        done = update_baselines(self.record, self.settings.baseline_dir, self.origin())
        said.revisions += done.revisions
        said.written += map(str, done.written)
        said.problems += done.problems
        if not (interrupted or done.written or said.problems):
            reasons = "; ".join(self.record.not_run) or "no test asked a question whose figures a baseline holds"
            said.problems.append(f"{R.NOTHING_STORED}: --fp8-update was given and nothing was stored: {reasons}")

    def _write_report(self, folder: Path, finished: bool) -> None:
        from pytest_fp8.report.files import write_beside, write_report

        self.record.finish(finished, self.said.problems)
        try:
            path = write_report(folder, self.record)
            written, notes = write_beside(folder, self.record, os.environ)
        except Fp8Error as error:
            self.said.problems.append(error.message)
            return
        self.said.written += map(str, (path, *written))
        self.said.notes += notes
