"""The pytest hooks of pytest-fp8, and nothing else. Imports stay light, so that an idle plugin costs milliseconds.

PYTEST_DONT_REWRITE: see the package's own file.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fp8.codes import R
from pytest_fp8.ending import when_parent_ends
from pytest_fp8.errors import Fp8Error
from pytest_fp8.fixtures import bf16_model, fp8_case, fp8_gpu, fp8_model, fp8_pair, fp8_workload
from pytest_fp8.items import FIXTURES, case_of, check_mark, check_pair, check_param, in_order, paired, question_of
from pytest_fp8.options import MARKER, add_options, read_settings
from pytest_fp8.session import SESSION, Session
from pytest_fp8.session_end import finish
from pytest_fp8.verdicts import SHOWN_AS, CheckFailed

if TYPE_CHECKING:
    from collections.abc import Generator

RUNNING = pytest.StashKey[bool]()
"""Whether a test's function is being called."""
__all__ = ["bf16_model", "fp8_case", "fp8_gpu", "fp8_model", "fp8_pair", "fp8_workload"]


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    marker = MARKER
    if config.getoption("markers", False):
        from pytest_fp8.libraries import documentation

        # An installed package has no such folder; reading its metadata takes milliseconds.
        marker = MARKER.replace("docs/options.md", documentation("options.md"))
    config.addinivalue_line("markers", marker)
    worker = getattr(config, "workerinput", None)
    try:
        settings = read_settings(config)
        if worker is not None:
            from pytest_fp8.xdist import take_share

            take_share(worker)
        elif workers := config.getoption("numprocesses", None):
            from pytest_fp8.xdist import share_out

            share_out(config, settings, workers)
        session = Session(settings, config.rootpath, is_worker=worker is not None)
        session.start(runs=not config.getoption("collectonly"))
    except Fp8Error as error:
        raise pytest.UsageError(error.message) from None
    config.stash[SESSION] = session


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(SESSION, None)
    if session is not None:
        session.close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    from pytest_fp8.report.header import header

    return header(config.stash[SESSION].settings, look=not config.getoption("collectonly"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not FIXTURES & set(metafunc.fixturenames):
        return
    from pytest_fp8.markers import cases_of

    marks = list(metafunc.definition.iter_markers_with_node("fp8"))
    if not marks:
        return
    try:
        cases = cases_of(metafunc.definition.nodeid, marks, metafunc.config.stash[SESSION].settings)
    except Fp8Error as error:
        # pytest.fail() would raise with this error as its context, and pytest would show both.
        raise pytest.fail.Exception(error.message, pytrace=False) from None
    metafunc.parametrize("fp8_case", cases, indirect=True, ids=[case.id for case in cases], scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(case_of(item) is not None for item in items):
        session = config.stash[SESSION]
        in_order(items, largest_first=session.is_worker and session.settings.declared)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    asked = [(case, question_of(item), item.nodeid) for item in session.items if (case := case_of(item)) is not None]
    if asked:
        whole = all(os.path.isdir(argument) for argument in session.config.args)
        from pytest_fp8.report.progress import follow

        (mine := session.config.stash[SESSION]).selected(asked, whole, paired(session.items))
        mine.endings.take()
        if mine.is_worker:
            # Where its controller is killed, xdist itself lets the test run on for 5 s, and longer in an arm's answer.
            when_parent_ends(signal.SIGTERM)
        mine.progress = follow(session.config, mine.ledger)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    session = config.stash[SESSION]
    if session.progress is None or config.getoption("collectonly"):
        return []
    session.progress.recall(config, session.gpu_key)
    return session.progress.planned([case.id for case in session.upcoming])


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items[:1]:
        item.config.stash[SESSION].ledger.partial = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    check_param(item)
    session, case = item.config.stash[SESSION], case_of(item)
    if session.progress is not None:
        session.progress.test(item.name if case is None else case.id, question_of(item))
    if case is None:
        check_mark(item, session.settings)
        return
    from pytest_fp8.markers import why_not

    reason, failure = why_not(case, session.settings, session.upcoming)
    if not reason:
        return
    if failure:
        session.ledger.skipped(item.nodeid, reason)
        needs = f"everything that case {case.id} needs, on the declared GPU"
        pytest.fail(Fp8Error(R.CANNOT_RUN_HERE, reason, expected=needs).message, pytrace=False)
    # As pytest's own skip marks do: the summary names the test's line, not this one.
    raise pytest.skip.Exception(reason, _use_item_location=True)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    pyfuncitem.stash[RUNNING] = True
    try:
        result = yield
    finally:
        pyfuncitem.stash[RUNNING] = False
    check_pair(pyfuncitem, pyfuncitem.config.stash[SESSION].settings)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    error = None if call.excinfo is None else call.excinfo.value
    if isinstance(error, Fp8Error):
        from pytest_fp8.report.tracebacks import end_at_the_users_line

        end_at_the_users_line(error.__traceback__)
    report = yield
    if isinstance(error, (CheckFailed, Fp8Error)):
        from pytest_fp8.report.tracebacks import headline_first

        headline_first(report, error)
    case = case_of(item)
    report.about_fp8 = case is not None or item.get_closest_marker("fp8") is not None
    if case is None:
        return report
    from pytest_fp8.report.known import note_failure

    session = item.config.stash[SESSION]
    ledger = session.ledger
    note_failure(ledger, case.id, report, error)
    if item.stash.get(RUNNING, False):
        # Before the test ends pytest asks for reports of its subtests. What these asked counts with the test.
        return report
    if report.when == "call" or not report.passed:
        ledger.finished(case.id, item.nodeid)
        # On a declared GPU every emulated test is skipped.
        if report.when != "teardown" and (case.needs_gpu or not session.settings.declared):
            ledger.ended(case.id, item.nodeid, report, case.needs_gpu)
    if report.when == "teardown":
        ledger.taken()
        session.note_durations()
        if session.is_worker:
            report.fp8_ledger = ledger.to_json()
        else:
            session.save(news=True)
    if report.when == "call":
        from pytest_fp8.report.formats import properties, told_verdict

        asked = ledger.taken()
        verdict = told_verdict(report, asked)
        if report.passed:
            report.fp8_verdict = verdict
        # JUnit writes them as the test's properties.
        found = properties(case.id, verdict, asked)
        item.user_properties += found
        report.user_properties += found
        html = item.config.getoption("htmlpath", None)
        if html and item.config.pluginmanager.has_plugin("html"):
            from pytest_fp8.report.html_extras import html_extras

            extras = html_extras(html, session.settings.report_dir, case.id, asked)
            report.extras = [*getattr(report, "extras", []), *extras]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """xdist: note what a worker has learned so far, which comes with the report of each of its tests."""
    node = getattr(report, "node", None)
    if node is not None and (learned := report.__dict__.pop("fp8_ledger", None)) is not None:
        mine = node.config.stash[SESSION]
        mine.interim.told[node.gateway.id] = learned
        mine.save(news=True)


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    if getattr(report, "when", "") == "call" and report.passed:
        return SHOWN_AS.get(getattr(report, "fp8_verdict", ""))
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, Any, Any]:
    mine = session.config.stash[SESSION]
    try:
        result = yield
    except KeyboardInterrupt as error:
        if mine.is_worker:
            # Nobody sees its terminal, for which pytest would read the source of every frame.
            raise error.with_traceback(None) from None
        raise
    finally:
        # Ctrl-C and signals come out here too, before pytest formats where they came: the GPU is free a second sooner.
        mine.endings.ignore()
        mine.end_arms()
    # Not in pytest_sessionfinish: pytest-benchmark writes its tables before any other plugin's.
    ledger = mine.ledger
    if ledger.entries:
        from pytest_fp8.report.benchmark import add_rows

        add_rows(session.config, ledger)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    mine = config.stash.get(SESSION, None)
    if mine is None:
        return
    if session.exitstatus == pytest.ExitCode.INTERRUPTED and config.pluginmanager.has_plugin("dsession"):
        from pytest_fp8.xdist import end_workers

        end_workers(config)
    mine.interim.close(mine.ledger)
    if mine.progress is not None:
        mine.progress.keep(config, mine.gpu_key, mine.ledger.open_tests or {})
    mine.ledger.partial |= bool(session.shouldstop or session.shouldfail) or mine.ledger.cut_short
    if mine.is_worker:
        config.workeroutput["fp8_ledger"] = mine.ledger.to_json()  # type: ignore[attr-defined]
        return
    interrupted = session.exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
    finish(mine, not config.getoption("collectonly"), interrupted)
    from pytest_fp8.report.tracebacks import fold

    # Not before: what other plugins write of a failure, as JUnit files, has no width.
    fold(config.pluginmanager.get_plugin("terminalreporter"))
    if mine.problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: Any) -> None:
    """xdist: this process has workers, and collects nothing itself."""
    node.config.stash[SESSION].endings.take()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """xdist: a worker has ended; merge its ledger."""
    learned = getattr(node, "workeroutput", {}).get("fp8_ledger")
    mine = node.config.stash[SESSION]
    if learned is not None and not mine.interim.closed:
        mine.interim.told.pop(node.gateway.id, None)
        mine.ledger.merge(learned)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist with ``-n`` and no ``--dist``: on a declared GPU the tests of a case go to one worker."""
    if not config.stash[SESSION].settings.declared or config.getoption("dist") != "load":
        return None
    from pytest_fp8.xdist import by_case

    return by_case(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session = config.stash[SESSION]
    if session.has_something_to_say():
        from pytest_fp8.report.terminal import write_summary

        write_summary(terminalreporter, session)
