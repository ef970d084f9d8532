"""What pytest finds of pytest-fp8: options, fixtures, the hook for others, and the session, whose methods are the other
hooks. Imports stay light, so that an idle plugin costs milliseconds.
"""

from __future__ import annotations

import pytest

from pytest_fp8.errors import Fp8Error
from pytest_fp8.fixtures import bf16_model, fp8_case, fp8_check, fp8_model, fp8_pair, fp8_script, fp8_workload
from pytest_fp8.options import MARKER, SCRIPT_MARKER, add_options, read_settings
from pytest_fp8.session import SESSION, Session

__all__ = ["bf16_model", "fp8_case", "fp8_check", "fp8_model", "fp8_pair", "fp8_script", "fp8_workload"]


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_fp8 import hooks

    pluginmanager.add_hookspecs(hooks)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    config.addinivalue_line("markers", SCRIPT_MARKER)
    try:
        settings = read_settings(config)
        if hasattr(config, "workerinput"):
            from pytest_fp8.xdist import take_share

            take_share(config.workerinput)
        session = config.stash[SESSION] = Session(settings, config)
    except Fp8Error as error:
        raise pytest.UsageError(error.message) from None
    config.pluginmanager.register(session, "fp8-session")
