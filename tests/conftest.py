"""Fixtures and markers of the plugin's own tests."""

from __future__ import annotations

import itertools
import multiprocessing.forkserver  # noqa: F401
import os
import signal
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest

# pytester forgets what an inner run imports: with these two the fork server that it started.
import pytest_fp8.arms.forked  # noqa: F401

pytest_plugins = ["pytester"]
sys.path.insert(0, str(Path(__file__).parent))

ENVIRONMENT = dict(os.environ)
CHANGED_BY_PYTESTER = ("HOME", "USERPROFILE", "PYTEST_DEBUG_TEMPROOT", "TOX_ENV_DIR")
REPORT = Path(__file__).parent.parent / ".fp8-report"
FAST = "not slow and not nightly"
SLOW_MODULE = "\npytestmark = pytest.mark.slow\n"


def pytest_configure(config):
    # What a shell starts in the background, or `nohup`, inherits that these are ignored; some tests send them.
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)
    # Files go to workers of `--dist loadfile` in their order, not by their numbers of tests.
    config.option.loadscopereorder = False
    if config.args_source is config.ArgsSource.TESTPATHS and not config.option.markexpr:
        # A bare `pytest` in a clone is somebody's first: the whole takes a quarter of an hour.
        config.option.markexpr = FAST
    config.addinivalue_line(
        "markers", "slow: imports torch, starts an arm or starts workers of pytest-xdist; the fast set leaves it out."
    )
    config.addinivalue_line(
        "markers", "nightly: repeats for other inputs what a test for each commit asserts; a release needs it."
    )
    config.addinivalue_line("markers", "nightly_beyond(n): nightly from the parameter after the first n on.")
    config.addinivalue_line("markers", "oldest: touches pytest's API; run with the oldest pytest, too.")


class Kept:
    """An installed distribution that reads its files once. Each inner pytest asks all of them for plugins, 50 ms of the
    150 that it takes; what is installed does not change meanwhile."""

    def __init__(self, distribution):
        self.distribution = distribution

    def __getattr__(self, name):
        value = getattr(self.distribution, name)
        if name in ("entry_points", "files", "metadata"):
            setattr(self, name, value)
        return value


KEPT = [Kept(each) for each in metadata.distributions()]
ALL_DISTRIBUTIONS = metadata.distributions


def pytest_sessionstart():
    metadata.distributions = lambda **asked: ALL_DISTRIBUTIONS(**asked) if asked else iter(KEPT)
    # As pytester sets it; not before this session's own terminal is made.
    os.environ["PY_COLORS"] = "0"


def fast(config):
    """Whether this run is of the fast set, as a bare ``pytest`` is."""
    return config.option.markexpr == FAST


def pytest_ignore_collect(collection_path, config):
    """What ``-m`` leaves out whole is not even imported, since most of it imports torch: the slow modules in the fast
    set, and those without a test for the oldest pytest where such tests alone are asked."""
    if not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    if fast(config) and SLOW_MODULE in text:
        return True
    return (config.option.markexpr.startswith("oldest") and "pytest.mark.oldest" not in text) or None


def pytest_collection_finish(session):
    if fast(session.config) and "torch" in sys.modules:
        raise pytest.UsageError("a module of the fast set imports torch: mark it as slow, whole")


LONGEST_FIRST = (
    "test_scripts.py",
    "test_ranks.py",
    "test_healthy.py",
    "test_layers_seen.py",
    "test_probes.py",
    "test_arms.py",
    "test_session_told.py",
    "test_installed.py",
    "test_ending.py",
    "test_zero3.py",
    "test_checkpoints.py",
    "test_steps.py",
    "test_workload.py",
    "test_other_backends.py",
    "test_curves.py",
    "test_transformer_engine.py",
    "test_script.py",
    "test_preparation.py",
    "test_observer.py",
)
"""Each goes to one worker: at the end it would run alone."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    seen = defaultdict(itertools.count)
    for item in items:
        beyond = item.get_closest_marker("nightly_beyond")
        if beyond is not None and next(seen[item.path, item.originalname]) >= beyond.args[0]:
            item.add_marker("nightly")
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(autouse=True)
def _fast_tests_import_no_torch(request):
    loaded = "torch" in sys.modules
    yield
    if fast(request.config):
        assert loaded or "torch" not in sys.modules, "this test imports torch: mark it as slow"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    """The environment of whoever runs the tests decides nothing in them."""
    from pytest_fp8.baselines.provenance import CI_VARIABLES

    for name in list(os.environ):
        if name.startswith("PYTEST_FP8_") or name in CI_VARIABLES:
            monkeypatch.delenv(name)


def _own_report():
    """The files in this repository's own report, with the time of their last change."""
    return {path: path.stat().st_mtime_ns for path in REPORT.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def _the_repositorys_report_is_left_alone():
    """A session of a test's own on files of this repository takes its ini file, which names a folder for the report.
    What the test makes up must not replace what the suite measured."""
    before = _own_report()
    yield
    assert _own_report() == before, "this test writes the repository's own report: give its session --fp8-report="


@pytest.fixture
def _torch_once(request):
    """pytester forgets what was imported since it began, and torch cannot be imported twice by one process."""
    if not fast(request.config):
        import torch  # noqa: F401


@pytest.fixture
def pytester(_torch_once, pytester, monkeypatch):
    """The arms of its sessions in this process (`runpytest`) are forks of one fork server, which has imported their
    libraries: 3 s of CPU time that each session in a process of its own needs again. It needs equal variables."""
    for name in CHANGED_BY_PYTESTER:
        if name in ENVIRONMENT:
            monkeypatch.setenv(name, ENVIRONMENT[name])
        else:
            monkeypatch.delenv(name, raising=False)
    return pytester


@pytest.fixture
def suite(pytester):
    """A folder with :data:`helpers.fakes.SUITE`."""
    from helpers.fakes import SUITE

    pytester.makepyfile(SUITE)
    return pytester


@pytest.fixture
def stored(suite, monkeypatch):
    """The same after a first update, with its baselines."""
    from helpers.fakes import H200, install, update

    install(monkeypatch, H200)
    assert suite.runpytest(*update()).ret == 0
    return suite


@pytest.fixture(scope="session")
def python_with_torch(tmp_path_factory):
    """Runs scripts in forks of a process that has torch."""
    from helpers.watching import PythonWithTorch

    process = PythonWithTorch(tmp_path_factory.mktemp("python"))
    yield process
    process.close()
