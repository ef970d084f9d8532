"""What the user asked for, read once into frozen settings. An option goes before its ini key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_fp8.errors import refuse

LONGEST_REASON = 500
"""Characters of a stored reason."""
FRESH_PAIRS = 4
"""Fresh pairs of processes that an update measures for each case: the speedup of one process is no evidence
(:data:`pytest_fp8.stats.looks.RUNS_TO_FAIL`)."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    gpu: str = "auto"
    """The declared GPU, one of :data:`pytest_fp8.gpu.KINDS`, or ``auto``."""
    strict: bool = False
    """Whether INCONCLUSIVE, INVALID and NOT_EXERCISED fail."""
    baseline_dir: Path = Path("baselines")
    """The folder of stored baselines; absolute once read."""
    report_dir: Path | None = None
    """The folder for the report; ``None``: nothing is written."""
    reason: str = ""
    """Why the baselines change; stored with them. Empty: this run stores none."""
    base: str = ""
    """The revision of base, whose FP8 arm is timed beside head's; empty: none is."""

    @property
    def declared(self) -> bool:
        """Whether the user named the GPU that this run must use."""
        return self.gpu != "auto"

    @property
    def update(self) -> bool:
        """Whether what this run measures becomes the new baselines."""
        return bool(self.reason)

    @property
    def asks(self) -> bool:
        """Whether a session with these settings says something at its end, also without a test of FP8."""
        return self.declared or self.strict or bool(self.base or self.reason or self.report_dir)


SETTINGS = pytest.StashKey[Settings]()
SESSION = pytest.StashKey[Any]()
"""Where a pytest ``Config`` keeps them, and its session once it is made (:func:`pytest_fp8.plugin.session_of`)."""

MARKERS = (
    "fp8(*, cases=[...], question=None, backend='torchao', recipe='tensorwise', options={}, emulated=False, "
    "compile=True, autocast=False, name='', gpus=1, parallel='', steps=0, seeds=0, tolerance=0.02): the "
    "FP8 cases that a test asks about; backend and recipe take lists as well, a case for each combination. "
    'the page "options" of the documentation, which pytest-fp8 --help names, says what each means',
    "fp8_script(command, *, bf16=[], fp8=[], env={}, seed=[], share=0.0, name='', emulated=False, gpus=1, steps=0, "
    "seeds=0, tolerance=0.02, floor=1.0): a training command as it is, which the fixture fp8_script runs with the "
    'words of bf16= and with those of fp8=. The page "watch" says what each means',
)


def add_options(parser: pytest.Parser) -> None:
    """Add every option, and the ini keys of those that belong to a project, to pytest's parser."""
    add = parser.getgroup("fp8", "FP8 training (pytest-fp8)").addoption
    add("--fp8-gpu", metavar="NAME", help="The GPU this run must use: auto, h100, h200, hopper, b200, ... (auto)")
    add("--fp8-strict", action="store_true", help="Fail what has no answer, and a session that skips all its FP8 tests")
    add("--fp8-base", metavar="REV", help="Time FP8 beside that of this commit: a loss of one per cent fails")
    add("--fp8-update", metavar="REASON", help="Store what this run measures as the new baselines, and why")
    add("--fp8-baselines", metavar="DIR", help="Folder of stored baselines (baselines, beside the ini file)")
    add("--fp8-report", metavar="DIR", help="Folder for this run's report (none is written)")
    parser.addini("fp8_strict", "Whether questions without an answer fail (as --fp8-strict)", type="bool")
    parser.addini("fp8_baselines", "Folder of stored baselines (as --fp8-baselines)", type="string", default="")
    parser.addini("fp8_report", "Folder for the report of each run (as --fp8-report)", type="string", default="")


def read_settings(config: pytest.Config) -> Settings:
    """The settings of a session; raises :class:`SettingsError` for what cannot be honoured."""
    name = _given(config, "fp8_gpu") or "auto"
    if name != "auto":
        from pytest_fp8 import gpu

        name = gpu.known(name)
    # One line of a summary.
    reason, base = " ".join(_given(config, "fp8_update").split()), _given(config, "fp8_base").strip()
    if reason and base:
        from pytest_fp8.codes import R

        refuse(
            R.OPTIONS_EXCLUDE,
            "--fp8-update and --fp8-base exclude each other",
            expected="a run that updates the baselines, or one that is gated on a base",
            seen=f"both, with --fp8-base={base}",
        )
    report = config.getoption("fp8_report")
    # An option without a value means none, where the ini file names one.
    report = config.getini("fp8_report") if report is None else report
    folder = _given(config, "fp8_baselines") or config.getini("fp8_baselines")
    return Settings(
        gpu=name,
        strict=config.getoption("fp8_strict") or config.getini("fp8_strict"),
        baseline_dir=config.rootpath / (folder or "baselines"),
        report_dir=config.rootpath / report if report else None,
        reason=reason[:LONGEST_REASON],
        base=base,
    )


def _given(config: pytest.Config, name: str) -> str:
    """The value of an option; empty where it was not given. One that is given and empty is a variable that nobody set:
    with it a gate would ask nothing."""
    value: str | None = config.getoption(name)
    if value is not None and not value.strip():
        from pytest_fp8.codes import R

        flag = f"--{name.replace('_', '-')}"
        refuse(
            R.EMPTY_OPTION,
            f"{flag} is given and empty",
            expected=f"{flag}=VALUE, or nothing at all",
            seen=f"{flag}=, without a value",
            cause=f"a variable that is not set, as in {flag}=$NAME",
        )
    return value or ""
