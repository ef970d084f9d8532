"""What pytest finds of pytest-fp8: options, fixtures, the hook for others. All other hooks are methods of one
:class:`~pytest_fp8.session.Session`, which is made once an option or a test asks for FP8: an idle plugin costs
milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_fp8.errors import CheckFailed, Fp8Error
from pytest_fp8.fixtures import bf16_model, fp8_case, fp8_check, fp8_model, fp8_pair, fp8_script, fp8_workload
from pytest_fp8.items import parametrize, wants_fp8
from pytest_fp8.options import MARKERS, SESSION, SETTINGS, add_options, read_settings

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_fp8.session import Session

__all__ = ["bf16_model", "fp8_case", "fp8_check", "fp8_model", "fp8_pair", "fp8_script", "fp8_workload"]

LIBRARIES = ("torch", "torchao", "transformer-engine")
"""Named in pytest's header."""


def session_of(config: pytest.Config) -> Session:
    """The session of this process, made and registered when it is first asked for. Raises :class:`Fp8Error`."""
    if SESSION not in config.stash:
        from pytest_fp8.session import Session

        session = config.stash[SESSION] = Session(config.stash[SETTINGS], config)
        config.pluginmanager.register(session, "fp8-session")
    found: Session = config.stash[SESSION]
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    try:
        settings = config.stash[SETTINGS] = read_settings(config)
        if hasattr(config, "workerinput"):
            from pytest_fp8.xdist import take_share

            take_share(config.workerinput)
        # With workers of pytest-xdist this process collects nothing itself.
        if settings.asks or config.getoption("tx", None):
            session_of(config)
    except Fp8Error as error:
        raise pytest.UsageError(error.message) from None


def pytest_report_header(config: pytest.Config) -> str:
    """Which GPU, which libraries, which baselines. A mere collection does not ask the driver."""
    settings = config.stash[SETTINGS]
    declared = f"{settings.gpu}, declared" if settings.declared else "auto"
    if config.getoption("collectonly"):
        return f"fp8: GPU not looked at for a mere collection (--fp8-gpu: {declared})"
    from pytest_fp8.gpu import detect
    from pytest_fp8.libraries import library_versions

    gpu, reason = detect()
    seen = f"{gpu.name}, driver {gpu.driver}" if gpu is not None else reason
    versions = library_versions(LIBRARIES)
    libraries = ", ".join(f"{name} {versions[name]}" if name in versions else f"no {name}" for name in LIBRARIES)
    place = settings.baseline_dir.name
    baselines = place if settings.baseline_dir.is_dir() else f"none, there is no folder {place}"
    base = f"; base {settings.base}" if settings.base else ""
    update = " (updating)" if settings.update else ""
    return f"fp8: {seen} (--fp8-gpu: {declared}); {libraries}; baselines: {baselines}{base}{update}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if wants_fp8(metafunc):
        parametrize(metafunc, session_of(metafunc.config).settings)


def pytest_itemcollected(item: pytest.Item) -> None:
    """A mark that no fixture reads is told as well: of a unittest's method, or of one parameter."""
    if item.get_closest_marker("fp8") is not None:
        session_of(item.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test may also make a Case or a Workload without any fixture."""
    error = None if call.excinfo is None else call.excinfo.value
    if not isinstance(error, (CheckFailed, Fp8Error)):
        return (yield)
    from pytest_fp8.report.terminal import end_at_the_users_line, headline_first

    if isinstance(error, Fp8Error):
        end_at_the_users_line(error.__traceback__)
    report = yield
    headline_first(report, error)
    return report
