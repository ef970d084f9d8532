"""The life of one pytest session: what its hooks do from the first option to the closing summary.

One :class:`Session` per pytest process is registered as a plugin of its own, so pytest calls its methods. Nothing here
imports torch; arms start when a test first asks (:mod:`pytest_fp8.pairs`).
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fp8.codes import R
from pytest_fp8.ending import Endings, when_parent_ends
from pytest_fp8.errors import Fp8Error, first_line, refuse
from pytest_fp8.items import (
    CHECKS,
    FIXTURES,
    SCRIPT,
    can_be_asked,
    case_of,
    check_mark,
    check_pair,
    in_order,
    question_of,
    questions_of,
)
from pytest_fp8.options import Settings
from pytest_fp8.pairs import Pairs
from pytest_fp8.plain import from_plain
from pytest_fp8.report.record import (
    JOURNAL,
    SCHEMA,
    Began,
    Closing,
    Collected,
    Ended,
    Notes,
    Origin,
    Record,
    Seconds,
    plain_line,
)
from pytest_fp8.report.rows import Answer
from pytest_fp8.verdicts import SHOWN_AS, CheckFailed

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_fp8.case import Case
    from pytest_fp8.report.progress import Progress

LIBRARIES = ("torch", "torchao", "transformer-engine")
"""Named in pytest's header."""
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
        self.said = Closing()
        self.told, self.endings = Notes(), Endings()
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
        """See that the report can be written, and take the baselines' lock where they are updated."""
        if self.settings.report_dir is not None:
            report, baselines = self.settings.report_dir.resolve(), self.settings.baseline_dir.resolve()
            if report.is_relative_to(baselines):
                refuse(
                    R.REPORT_AMONG_BASELINES,
                    "the report is to be written into the folder of the baselines",
                    expected="folders of their own: what is below the baselines' folder is read as baselines",
                    seen=f"--fp8-report={report}, and baselines in {baselines}",
                    next_step="--fp8-report=fp8-report",
                )
            require_writable(self.settings.report_dir)
        if self.settings.update:
            from pytest_fp8.baselines.atomic import updating

            self._held.enter_context(updating(self.settings.baseline_dir))

    def pytest_unconfigure(self) -> None:
        """End all arms and give the baselines' lock back, once nothing is written any more."""
        self.said.notes += self.pairs.end()
        self._held.close()
        self.endings.give_back()

    def pytest_report_header(self) -> list[str]:
        return _header(self.settings, look=self.runs)

    # -- collection -----------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if not FIXTURES & set(metafunc.fixturenames):
            return
        test = metafunc.definition
        try:
            if SCRIPT in metafunc.fixturenames:
                from pytest_fp8.script.command import case_of_mark

                cases = case_of_mark(test)
            else:
                from pytest_fp8.markers import cases_of

                marks = list(test.iter_markers_with_node("fp8"))
                cases = cases_of(test.nodeid, marks, self.settings) if marks else []
        except Fp8Error as error:
            # pytest.fail() would raise with this error as its context, and pytest would show both.
            raise pytest.fail.Exception(error.message, pytrace=False) from None
        if not cases:
            return
        metafunc.parametrize("fp8_case", cases, indirect=True, ids=[case.id for case in cases], scope="session")
        # Known from collection on: a test of each question, which -k finds by its name.
        questions = dict.fromkeys(question for case in cases for question in questions_of(case))
        for check in CHECKS:
            if check in metafunc.fixturenames:
                metafunc.parametrize(check, list(questions), indirect=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if any(case_of(item) is not None for item in items):
            items[:] = filter(can_be_asked, items)
            in_order(items)

    def pytest_deselected(self) -> None:
        self._part = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        asked = {
            item.nodeid: (case, question_of(item)) for item in session.items if (case := case_of(item)) is not None
        }
        if not asked:
            return
        from pytest_fp8.report.progress import follow

        try:
            self.pairs.collected(list(asked.values()))
        except Fp8Error as error:
            raise pytest.UsageError(error.message) from None
        stored = {case.id for case in self.pairs.cases if case.needs_gpu and case.backend != "bf16"}
        whole = all(os.path.isdir(argument) for argument in self.config.args) and not self._part
        tests = {test: case.id for test, (case, _) in asked.items()}
        self._news.append(plain_line(Collected(tests, sorted(stored), not whole)))
        self.endings.take()
        if self.is_worker:
            # Where its controller is killed, xdist itself lets the test run on for 5 s, and longer in an arm's answer.
            when_parent_ends(signal.SIGTERM)
        else:
            self._tell_the_record()
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
        if not reason:
            return
        if failure:
            item.stash[CANNOT] = reason
            needs = f"everything that case {case.id} needs, on the declared GPU"
            pytest.fail(Fp8Error(R.CANNOT_RUN_HERE, reason, expected=needs).message, pytrace=False)
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
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        from pytest_fp8.report.terminal import end_at_the_users_line, headline_first

        error = None if call.excinfo is None else call.excinfo.value
        if isinstance(error, Fp8Error):
            end_at_the_users_line(error.__traceback__)
        report = yield
        if isinstance(error, (CheckFailed, Fp8Error)):
            headline_first(report, error)
        case = case_of(item)
        if case is not None:
            self._tell(item, case, report)
        return report

    def _tell(self, item: pytest.Item, case: Case, report: Any) -> None:
        """Put what the test was told on its report."""
        if item.stash.get(RUNNING, False):
            # Before the test ends pytest asks for reports of its subtests. What these asked counts with the test.
            return
        lines = [*self._news, *self.told.take()]
        self._news.clear()
        if report.when == "call" or not report.passed:
            lines.append(plain_line(self._ended(item, case, report)))
        if report.when == "teardown" and (seconds := self.pairs.seconds()):
            lines.append(plain_line(Seconds(**seconds)))
        report.fp8 = lines
        if report.when == "call":
            from pytest_fp8.report.files import properties, told_verdict

            asked = {each.question: each for each in self.told.answers if each.judged}
            report.fp8_verdict = verdict = told_verdict(report, list(asked.values()))
            # JUnit writes them as the test's properties.
            found = properties(case.id, verdict, list(asked.values()))
            item.user_properties += found
            report.user_properties += found

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
        return Ended(
            item.nodeid,
            case.id,
            "known" if known and (answers or report.when == "call") else report.outcome,
            reason,
            ran if counts else None,
            case.needs_gpu,
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The same for a test of this process and for one of a worker, whose controller this is."""
        if not self.is_worker:
            for line in self.record.add(getattr(report, "fp8", ())):
                if isinstance(line, Answer):
                    self.config.hook.pytest_fp8_answer(config=self.config, report=report, answer=line)

    def pytest_fp8_answer(self, answer: Answer) -> None:
        from pytest_fp8.report.files import add_rows

        add_rows(self.config, answer, self.record)

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        if getattr(report, "when", "") == "call" and report.passed:
            return SHOWN_AS.get(getattr(report, "fp8_verdict", ""))
        return None

    def _tell_the_record(self) -> None:
        """Tell what no report has taken, as of a test that was interrupted."""
        seconds = self.pairs.seconds()
        more = [plain_line(Seconds(**seconds))] if seconds else []
        self.record.add([*self._news, *self.told.take(), *more])
        self._news.clear()

    # -- workers of pytest-xdist ----------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self) -> None:
        """This process has workers, and collects nothing itself."""
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
            result = yield
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
                self._tell_the_record()
            self.said.notes += self.pairs.end()
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.INTERRUPTED and self.config.pluginmanager.has_plugin("dsession"):
            from pytest_fp8.xdist import end_workers

            end_workers(self.config)
        if self.is_worker:
            return
        self.record.stopped = bool(session.shouldstop or session.shouldfail)
        if self.runs:
            self._finish(session.exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR))
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
            from pytest_fp8.gpu import detect

            gpu = detect()[0]
            measured_on = gpu.describe() if gpu is not None else {"name": "emulated" if self.record.entries else "none"}
            self._origin = provenance(self.root, measured_on, self.settings.reason, self.settings.baseline_dir)
        return self._origin

    def _begins(self) -> Began:
        origin, rows = self.origin(), list(self.record.entries.values())
        # An emulated case used no GPU.
        gpu = {"name": "emulated"} if rows and rows[0].gpu == "emulated" else origin["gpu"]
        return Began(SCHEMA, from_plain(Origin, {**origin, "gpu": gpu}))

    def _finish(self, interrupted: bool) -> None:
        """Write baselines and the report; note what makes a session fail by itself."""
        from pytest_fp8.report.files import holds_report, remove_report

        settings, record = self.settings, self.record
        nothing = "" if interrupted else self._ran_nothing()
        if nothing:
            self.said.problems.append(f"{R.NOTHING_RAN}: {nothing}. A gate that ran nothing is not green.")
        elif settings.base:
            self._note_base()
        if settings.declared and record.ran_on_gpu:
            self._note_unanswered()
        elif not settings.declared and not settings.strict:
            from pytest_fp8.report.terminal import passed_without

            self.said.notes += passed_without(record.asserted())
        if settings.update:
            self.origin()
        report, asked = settings.report_dir, bool(record.lines)
        if report is not None and asked:
            self.origin()
            # Where this session has no answer, nobody must take an earlier one's for its own.
            remove_report(report)
        if settings.update:
            self._update(interrupted)
        elif settings.declared and record.ran_on_gpu:
            self._note_baselines()
        named = settings.baseline_dir != self.root / Settings.baseline_dir and not self.pairs.at_base
        if asked and named and not settings.baseline_dir.is_dir():
            self.said.notes.append(
                f"{R.NO_BASELINES}: --fp8-baselines names {settings.baseline_dir}, and there is no such folder: "
                "nothing was compared with a stored baseline"
            )
        self.said.notes += [
            f"{R.EXCEPTION_CAUGHT}: {each} is FAIL, and no test failed with it: its exception was caught"
            for each in record.swallowed()
        ]
        # Last: the report has what made the session fail.
        if report is None:
            return
        if not asked and holds_report(report):
            kept = f"{report} keeps an earlier session's report: this one asked nothing of FP8"
            self.said.notes += [kept] if self.said.problems else []
        elif asked or self.said.problems:
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
            stored = (
                "its own" if self.pairs.at_base else f"those in {settings.baseline_dir.name}, since it has none there"
            )
            commit = self.pairs.base_commit[:12]
            self.said.notes.append(
                f"timed beside the base {settings.base}: commit {commit}; stored baselines: {stored}"
            )
        else:
            why = "no test that ran asked assert_speedup(), or it had no answer" if ran else "no FP8 test ran on a GPU"
            # Only under --fp8-strict, and where a GPU answered: a job's environment may name a base for steps of all
            # kinds.
            said = self.said.problems if settings.strict and ran else self.said.notes
            said.append(f"{R.BASE_NOT_TIMED}: nothing was timed beside the base {settings.base}: {why}")

    def _note_unanswered(self) -> None:
        from pytest_fp8.ci import ci_variable
        from pytest_fp8.report.terminal import unanswered

        settings = self.settings
        problems, notes = unanswered(
            self.record.asserted(),
            gpu=self.pairs.gpu_key + (f" at base {settings.base}" if self.pairs.at_base else ""),
            in_ci=bool(ci_variable(os.environ)),
            first_steps=f'store them (pytest --fp8-gpu={settings.gpu} --fp8-update="first"), '
            "or compare with a base and need none (--fp8-base=main)",
        )
        # Under --fp8-strict its test fails.
        self.said.problems += [] if settings.strict else problems
        self.said.notes += notes + (problems if settings.strict else [])

    def _update(self, interrupted: bool) -> None:
        from pytest_fp8.baselines.update import update_baselines

        done = update_baselines(self.record, self.settings.baseline_dir, self.origin())
        self.said.revisions += done.revisions
        self.said.written += map(str, done.written)
        self.said.problems += done.problems
        self.said.notes += done.notes
        if done.written and not self.origin()["commit"]:
            self.said.notes.append(
                "the sessions that were stored name no commit: git tells of none here (git status says why), and no "
                "variable of a job, GITHUB_SHA or CI_COMMIT_SHA"
            )
        if not (interrupted or done.written or self.said.problems):
            reasons = "; ".join(self.record.not_run) or "no test asked a question whose figures a baseline holds"
            self.said.problems.append(f"{R.NOTHING_STORED}: --fp8-update was given and nothing was stored: {reasons}")

    def _note_baselines(self) -> None:
        from pytest_fp8.baselines.check import presence
        from pytest_fp8.baselines.store import Folder

        problems, notes = presence(self.record, Folder(self.settings.baseline_dir), self.pairs.gpu_key)
        self.said.problems += problems
        self.said.notes += notes

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


def require_writable(folder: Path) -> None:
    """Make a folder, and raise :class:`SettingsError` where no file can be made in it: a run of hours must not learn it
    at its end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        refuse(
            R.NOT_WRITABLE,
            f"the report cannot be written to {folder}",
            expected="a folder that exists or can be made, and in which files can be made",
            seen=f"{type(error).__name__}: {error}",
            next_step="another folder: --fp8-report=DIR, or fp8_report in the ini file",
        )


SESSION = pytest.StashKey[Session]()
"""Where a pytest ``Config`` keeps its session."""


def _header(settings: Settings, look: bool) -> list[str]:
    """The line for pytest's header: which GPU, which libraries, which baselines. ``look``: whether to ask the driver,
    which a mere collection does not."""
    declared = "auto" if not settings.declared else f"{settings.gpu}, declared"
    if not look:
        return [f"fp8: GPU not looked at for a mere collection (--fp8-gpu: {declared})"]
    from pytest_fp8.gpu import detect
    from pytest_fp8.libraries import library_versions

    gpu, reason = detect()
    seen = f"{gpu.name}, driver {gpu.driver}" if gpu is not None else reason
    key = gpu.key if gpu is not None else settings.gpu
    folder, place = settings.baseline_dir / key, settings.baseline_dir.name
    stored = len(list(folder.glob("[!_.]*.json"))) if folder.is_dir() else 0
    baselines = f"{stored} in {place}/{key}" if key != "auto" else place
    if not settings.baseline_dir.is_dir():
        baselines = f"none, there is no folder {place}"
    if settings.base:
        baselines += f"; base {settings.base}"
    update = " (updating)" if settings.update else ""
    versions = library_versions(LIBRARIES)
    libraries = ", ".join(f"{name} {versions[name]}" if name in versions else f"no {name}" for name in LIBRARIES)
    return [f"fp8: {seen} (--fp8-gpu: {declared}); {libraries}; baselines: {baselines}{update}"]
