"""What a session does once its last test is done: baselines, candidates, the report; what makes it fail by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.codes import R
from pytest_fp8.options import Settings

if TYPE_CHECKING:
    from pytest_fp8.session import Session


def finish(session: Session, ran: bool, interrupted: bool = False) -> None:
    """Write baselines, candidates and the report; note what makes a session fail by itself. ``ran``: its tests were not
    only collected."""
    settings, ledger = session.settings, session.ledger
    if settings.declared and ran and ledger.ran_on_gpu == 0 and not interrupted:
        reasons = "; ".join(ledger.not_run) or "no test of this run asks anything of a GPU"
        session.problems.append(
            f"{R.NOTHING_RAN}: --fp8-gpu={settings.gpu} was declared and no FP8 test ran on it: {reasons}. "
            "A gate that ran nothing is not green."
        )
    elif settings.strict and ran and ledger.not_run and not (settings.declared or ledger.ran or interrupted):
        session.problems.append(
            f"{R.NOTHING_RAN}: no FP8 test ran under --fp8-strict: {'; '.join(ledger.not_run)}. "
            "A gate that ran nothing is not green."
        )
    elif ran and settings.base:
        _note_base(session)
    if settings.declared and ledger.ran_on_gpu:
        _note_unanswered(session)
    elif not settings.declared and not settings.strict:
        from pytest_fp8.rules.undecided import passed_without

        session.notes += passed_without(ledger.answers())
    # Before the first file is written: a report may be kept in git, too.
    wanted = (ledger.entries and settings.update) or (ran and settings.report_dir)
    origin = session.interim.origin or (session.origin() if wanted else {})
    asked = bool(ledger.entries or session.upcoming or ledger.not_run)
    earlier = ran and settings.report_dir is not None and session.interim.found_report(settings.report_dir)
    if settings.report_dir is not None and earlier and asked:
        from pytest_fp8.report.files import remove_report

        # Where this session has no answer, or no candidate, nobody must take an earlier one's for its own.
        remove_report(settings.report_dir)
    # Before an update: a candidate has the stored sessions and this one, which would be stored already.
    if settings.report_dir is not None and ledger.entries:
        _candidates(session, settings.report_dir, origin)
    if settings.update:
        _update(session, origin, ran and not interrupted)
    elif settings.declared and ran and ledger.ran_on_gpu:
        _note_baselines(session)
    default = session.root / Settings.baseline_dir
    named = settings.baseline_dir != default and not session.at_base
    if ran and asked and named and not settings.baseline_dir.is_dir():
        session.notes.append(
            f"{R.NO_BASELINES}: --fp8-baselines names {settings.baseline_dir}, and there is no such folder: nothing "
            "was compared with a stored baseline"
        )
    from pytest_fp8.report.known import swallowed

    session.notes += [
        f"{R.EXCEPTION_CAUGHT}: {each} is FAIL, and no test failed with it: its exception was caught"
        for each in swallowed(ledger)
    ]
    # Last: the report has what made the session fail.
    if settings.report_dir is not None and ran and (asked or (session.problems and not earlier)):
        _report(session, settings.report_dir, origin, not (interrupted or ledger.cut_short))
    elif earlier and session.problems:
        session.notes.append(f"{settings.report_dir} keeps an earlier session's report: this one asked nothing of FP8")


def _note_base(session: Session) -> None:
    """Which commit was timed beside this one, or that none was: ``assert_speedup()`` alone asks it."""
    settings, ledger = session.settings, session.ledger
    answers = (each for entry in ledger.entries.values() for each in entry.decisions.values())
    if not any(each["numbers"].get("base") for each in answers):
        why = "no test that ran asked assert_speedup(), or it had no answer"
        why = why if ledger.ran_on_gpu else "no FP8 test ran on a GPU"
        # Only under --fp8-strict, and where a GPU answered: a job's environment may name a base for steps of all kinds.
        said = session.problems if settings.strict and ledger.ran_on_gpu else session.notes
        said.append(f"{R.BASE_NOT_TIMED}: nothing was timed beside the base {settings.base}: {why}")
    else:
        stored = "its own" if session.at_base else f"those in {settings.baseline_dir.name}, since it has none there"
        commit = session.base_commit[:12]
        session.notes.append(f"timed beside the base {settings.base}: commit {commit}; stored baselines: {stored}")


def _note_unanswered(session: Session) -> None:
    from pytest_fp8.ci import ci_variable
    from pytest_fp8.rules.undecided import unanswered

    settings = session.settings
    found = unanswered(
        session.ledger.answers(),
        gpu=session.gpu_key + (f" at base {settings.base}" if session.at_base else ""),
        fails=not settings.strict,
        in_ci=bool(ci_variable(os.environ)),
        first_steps=f'store them (pytest --fp8-gpu={settings.gpu} --fp8-update="first"), '
        "promote what such a run wrote elsewhere (--fp8-baselines FOLDER; pytest-fp8 baselines promote FOLDER "
        '--reason "first"), or compare with a base and need none (--fp8-base=main)',
    )
    session.problems += found.problems
    session.notes += found.notes


def _update(session: Session, origin: dict[str, Any], whole: bool) -> None:
    from pytest_fp8.baselines.update import update_baselines

    done = update_baselines(session.ledger, session.settings.baseline_dir, origin)
    session.revisions += done.revisions
    session.written += map(str, done.written)
    session.problems += done.problems
    session.notes += done.notes
    if done.written and not origin["commit"]:
        session.notes.append(
            "the sessions that were stored name no commit: git tells of none here (git status says why), and no "
            "variable of a job, GITHUB_SHA or CI_COMMIT_SHA"
        )
    if whole and not (done.written or session.problems):
        reasons = "; ".join(session.ledger.not_run) or "no test asked a question whose figures a baseline holds"
        said = f"--fp8-update was given and nothing was stored: {reasons}"
        session.problems.append(f"{R.NOTHING_STORED}: {said}")


def _note_baselines(session: Session) -> None:
    from pytest_fp8.baselines.check import presence
    from pytest_fp8.baselines.source import Folder

    found = presence(session.ledger, session.source(), Folder(session.settings.baseline_dir), session.gpu_key)
    session.problems += found.problems
    session.notes += found.notes


def _candidates(session: Session, folder: Path, origin: dict[str, Any]) -> None:
    from pytest_fp8.errors import Fp8Error
    from pytest_fp8.report.files import write_candidates

    try:
        session.notes += write_candidates(session.ledger, folder, session.settings.baseline_dir, origin)
    except Fp8Error as error:
        session.problems.append(error.message)


def _report(session: Session, folder: Path, origin: dict[str, Any], finished: bool) -> None:
    from pytest_fp8.errors import Fp8Error
    from pytest_fp8.report.files import write_beside, write_report

    try:
        report = write_report(session.ledger, folder, origin, session.problems, finished)
        written, notes = write_beside(report, os.environ)
        session.written += [str(path) for path in (report, *written)]
        session.notes += notes
    except Fp8Error as error:
        session.problems.append(error.message)
