"""Makes suites/ importable for tests/; lets pytest start here without the plugin."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "suites"))


def without_plugin(pluginmanager):
    """Whether pytest-fp8 is left out (``-p no:fp8``). A module that is named (``PYTEST_PLUGINS``) has another name."""
    return not any(map(pluginmanager.has_plugin, ("fp8", "pytest_fp8.plugin")))


def pytest_addoption(parser, pluginmanager):
    """``pytest -p no:fp8`` here: the ini file of this repository has a key of the plugin's, which is then unknown."""
    if without_plugin(pluginmanager):
        parser.addini("fp8_report", "read by the plugin, which is not loaded")


def pytest_configure(config):
    if without_plugin(config.pluginmanager):
        config.addinivalue_line("markers", "fp8: read by the plugin, which is not loaded")
