"""What a session looks at and takes before its tests are collected: places that it will write to."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse
from pytest_fp8.options import Settings


def prepare(settings: Settings, root: Path, held: ExitStack, writes: bool, runs: bool) -> str:
    """See that the base of the project at ``root`` is there and the report can be written, take the baselines' lock
    where they are updated, which ``held`` gives back. ``writes``: whether this
    process runs tests and writes what they found. ``runs``: whether it, or a worker of pytest-xdist, runs them.

    Gives base's commit, empty without one: what its name means may change while tests run.

    Raises :class:`SettingsError` and :class:`BaselineError`.
    """
    base = ""
    if runs and settings.base:
        from pytest_fp8.arms.environment import commit_of

        base = commit_of(settings.base, root)
    if settings.report_dir is not None and writes:
        _require_apart(settings.report_dir, settings.baseline_dir)
        require_writable(settings.report_dir)
    if settings.update and writes:
        from pytest_fp8.baselines.atomic import updating

        held.enter_context(updating(settings.baseline_dir))
    return base


def _require_apart(report: Path, baselines: Path) -> None:
    report, baselines = report.resolve(), baselines.resolve()
    if report.is_relative_to(baselines) or baselines.is_relative_to(report / "candidates"):
        refuse(
            R.REPORT_AMONG_BASELINES,
            "the report is to be written into the folder of the baselines",
            expected="folders of their own: what is below the baselines' folder is read as baselines, and a report's "
            "candidates are replaced by the next session's",
            seen=f"--fp8-report={report}, and baselines in {baselines}",
            next_step="--fp8-report=fp8-report",
        )


def require_writable(folder: Path, what: str = "the report", option: str = "fp8-report-dir") -> None:
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
