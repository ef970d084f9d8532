"""Makes suites/ importable for tests/; lets pytest start here without the plugin."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "suites"))


def pytest_addoption(parser, pluginmanager):
    """``pytest -p no:fp8`` here: the ini file of this repository has a key of the plugin's, which is then unknown."""
    if not pluginmanager.has_plugin("fp8"):
        parser.addini("fp8_report_dir", "read by the plugin, which is not loaded")


def pytest_configure(config):
    if not config.pluginmanager.has_plugin("fp8"):
        config.addinivalue_line("markers", "fp8: read by the plugin, which is not loaded")
