"""A misspelt environment variable, which would otherwise change nothing without a word."""

from __future__ import annotations

import os
from collections.abc import Set
from typing import TYPE_CHECKING

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse_unknown

if TYPE_CHECKING:
    import pytest

PREFIX = "PYTEST_FP8_"
NO_OPTION = {"PYTEST_FP8_COMMIT", "PYTEST_FP8_ARM", "PYTEST_FP8_NOT_FROM"}
"""The commit that a report names, and what arms are given."""


def warn_of_unknown(config: pytest.Config, known: Set[str]) -> None:
    """As pytest does of unknown keys in an ini file. ``known``: the options' variables. Raises :class:`SettingsError`
    where warnings are errors."""
    unknown = sorted({name for name in os.environ if name.startswith(PREFIX)} - known - NO_OPTION)
    if not unknown:
        return
    import pytest

    for name in unknown:
        try:
            config.issue_config_time_warning(pytest.PytestConfigWarning(f"Unknown environment variable: {name}"), 2)
        except pytest.PytestConfigWarning:
            refuse_unknown(R.UNKNOWN_NAME, f"{name} is no option's environment variable", name, known)
