"""Fixtures of the plugin's own tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config):
    config.addinivalue_line("markers", "inner_pytest: runs pytest with the plugin; added to whatever uses `pytester`.")
    config.addinivalue_line(
        "markers", 'slow: takes more than a second or two; the inner loop leaves it out: -m "not slow"'
    )


def pytest_collection_modifyitems(items):
    for item in items:
        if "pytester" in item.fixturenames:
            item.add_marker("inner_pytest")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    """The environment of whoever runs the tests decides nothing in them."""
    import os

    from pytest_fp8.options import CI_VARIABLES

    for name in list(os.environ):
        if name.startswith("PYTEST_FP8_") or name in CI_VARIABLES:
            monkeypatch.delenv(name)
