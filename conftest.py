"""Makes suites/ importable, for its own test files, for tests/ and for the arms; runs the controls last."""

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


def pytest_collection_modifyitems(items):
    """The arm of a control takes the GPU's memory from healthy arms, which would have to be built again."""
    items.sort(key=lambda item: item.path.name == "test_controls.py")
