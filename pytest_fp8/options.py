"""What the user asked for, read once into frozen settings. Precedence: option, environment, ini."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fp8.ci import FALSE, refuse_in_ci
from pytest_fp8.codes import R
from pytest_fp8.errors import refuse, refuse_unknown

if TYPE_CHECKING:
    import pytest

LEAST_PROCESSES = 2
"""That an update may measure: the speedup of one process is no evidence (:data:`pytest_fp8.rules.change.RUNS_TO_FAIL`).
Said when the run begins, not when it has measured for minutes."""
LONGEST_REASON = 500
"""Characters of a stored reason."""
TRUE = ("1", "true", "yes", "on")
NO_OPTION = {"PYTEST_FP8_COMMIT", "PYTEST_FP8_ARM", "PYTEST_FP8_NOT_FROM"}
"""The commit that a report names, and what arms are given."""
MAY_BE_EMPTY = ("fp8_report_dir", "fp8_cache_dir")
"""Folders that are given empty to have none, where an ini file names one."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    gpu: str = "auto"
    """The declared GPU, one of :data:`pytest_fp8.gpu.NAMES`, or ``auto``."""
    strict: bool = False
    """Whether INCONCLUSIVE, INVALID and NOT_EXERCISED fail."""
    undecided: str = "fail"
    """What a question without an answer does to a session on a declared GPU: ``fail`` or ``warn``."""
    undecided_budget: int | None = None
    """How many questions may end INCONCLUSIVE there; ``None``: :data:`pytest_fp8.rules.undecided.BUDGET`."""
    baseline_dir: Path = Path("baselines")
    """The folder of stored baselines; absolute once read."""
    baselines_from: str = ""
    """The git revision whose baselines are gated on; empty: those in the folder."""
    report_dir: Path | None = None
    """The folder for candidates and the report; ``None``: nothing is written."""
    update: bool = False
    """Whether what this run measures becomes the new baselines."""
    reason: str = ""
    """Why the baselines change; stored with them."""
    processes: int = 4
    """Fresh pairs of processes that an update measures per case."""
    base_python: str = ""
    base_git: str = ""
    """The interpreter and the revision of base, whose FP8 arm is timed beside head's; both empty: none is."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Model name -> local folder of weights."""
    durations: bool = False
    """Whether to say where the time of the arms went."""
    cache_dir: Path | None = None
    """The folder of compiled code; ``None``: torch's own."""

    @property
    def declared(self) -> bool:
        """Whether the user named the GPU that this run must use."""
        return self.gpu != "auto"


@dataclass(frozen=True)
class Option:
    """One setting by its three names: option, environment variable and ini key."""

    flag: str
    """The option, e.g. ``--fp8-gpu``."""
    help: str
    metavar: str = ""
    """How the help names its value; empty: it takes none."""

    @property
    def dest(self) -> str:
        """Its ini key, and its name in pytest's own namespace, e.g. ``fp8_gpu``."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def environment(self) -> str:
        """Its environment variable, e.g. ``PYTEST_FP8_GPU``: plain ``FP8_GPU`` could belong to another tool."""
        return "PYTEST_" + self.dest.upper()


OPTIONS: tuple[Option, ...] = (
    Option("--fp8-gpu", "the GPU this run must use: auto, h100, h200, hopper, b200, ... (default: auto)", "NAME"),
    Option("--fp8-strict", "INCONCLUSIVE, INVALID and NOT_EXERCISED fail, and a session that skips all its FP8 tests"),
    Option("--fp8-undecided", "a question without an answer, on a declared GPU: fail or warn (default: fail)", "WHAT"),
    Option("--fp8-undecided-budget", "how many may be INCONCLUSIVE (default: 1 in 20, and 1 at least)", "N"),
    Option("--fp8-baseline-dir", "folder of stored baselines (default: baselines, beside the ini file)", "DIR"),
    Option("--fp8-baselines-from", "gate on the baselines of this git revision, not on those of the checkout", "REV"),
    Option("--fp8-report-dir", "folder for this run's report and baseline candidates (default: none written)", "DIR"),
    Option("--fp8-update-baselines", "store what this run measures as the new baselines; needs --fp8-reason"),
    Option("--fp8-reason", "why the baselines change; stored with them", "TEXT"),
    Option("--fp8-update-in-ci", "allow --fp8-update-baselines in CI: this job is there to update them"),
    Option("--fp8-processes", "fresh pairs of processes that an update measures per case: 2 or more (default: 4)", "N"),
    Option("--fp8-base-python", "time FP8 beside that of this interpreter: a loss of one per cent fails", "PYTHON"),
    Option("--fp8-base-git", "time FP8 beside that of this commit: a loss of one per cent fails", "REV"),
    Option("--fp8-durations", "say where the time of the arms went: builds by phase, and each question"),
    Option("--fp8-cache-dir", "folder that keeps the arms' compiled code for later runs (default: torch's own)", "DIR"),
    Option("--fp8-weights", "use a local folder of weights for a model: MODEL=DIR; may be repeated", "MODEL=DIR"),
)


NO_INI_KEY = (
    *("fp8_update_baselines", "fp8_reason", "fp8_update_in_ci", "fp8_baselines_from"),
    *("fp8_undecided", "fp8_undecided_budget", "fp8_base_python", "fp8_base_git"),
)
"""Settings of one run, which an ini file has no key for."""

MARKER = (
    "fp8(*, cases=[...], question=None, model='own', backend='torchao', recipe='tensorwise', options={}, "
    "compile=True, emulated=False, ...): the FP8 cases that a test asks about; model, backend and recipe take lists as "
    "well, a case for each combination. Also: activation_checkpointing, batch, seq, chip, weights, lora, lora_targets, "
    "name, loss_steps, loss_seeds, gpus, parallel, questions, tolerance, floor, checkpoint_formats, resume, "
    "slower_because; docs/options.md says what each means"
)


def add_options(parser: pytest.Parser) -> None:
    """Add every option and its ini key to pytest's parser."""
    group = parser.getgroup("fp8", "FP8 training (pytest-fp8)")
    for option in OPTIONS:
        more: dict[str, Any] = {"dest": option.dest, "default": None, "help": option.help}
        if not option.metavar:
            group.addoption(option.flag, action="store_true", **more)
        elif option.dest == "fp8_weights":
            group.addoption(option.flag, action="append", metavar=option.metavar, **more)
        else:
            group.addoption(option.flag, metavar=option.metavar, **more)
        if option.dest not in NO_INI_KEY:
            parser.addini(option.dest, f"{option.help} (as {option.flag})", type=_ini_type(option), default="")


def _ini_type(option: Option) -> Any:
    """What an ini file gives: in pytest 9's own table values have types."""
    import pytest

    if option.dest == "fp8_weights":
        return "args"
    if option.metavar == "N":
        # Older ones have no such type, and no table with types either.
        return "int" if pytest.version_tuple >= (8, 4) else "string"
    return "string" if option.metavar else "bool"


def read_settings(config: pytest.Config) -> Settings:
    """The settings of a session; raises :class:`SettingsError` for what cannot be honoured."""
    if not hasattr(config, "workerinput"):
        # An xdist worker is given the options of its controller, which has checked them.
        _warn_of_unknown_variables(config)
    values = {option.dest: _value(config, option) for option in OPTIONS}
    update = _truth(values["fp8_update_baselines"], "--fp8-update-baselines")
    reason = _reason(config, str(values["fp8_reason"]).strip(), update)
    for flag in ("--fp8-baselines-from", "--fp8-base-git", "--fp8-base-python"):
        if update and (given := values[flag.removeprefix("--").replace("-", "_")]):
            refuse(
                R.OPTIONS_EXCLUDE,
                f"--fp8-update-baselines and {flag} exclude each other",
                expected="a run that updates the baselines, or one that is gated on something else",
                seen=f"both, with {flag}={given}",
            )
    if update and not _truth(values["fp8_update_in_ci"], "--fp8-update-in-ci"):
        refuse_in_ci(os.environ)
    return Settings(
        gpu=_declared(str(values["fp8_gpu"] or "auto")),
        strict=_truth(values["fp8_strict"], "--fp8-strict"),
        undecided=_undecided(str(values["fp8_undecided"] or Settings.undecided)),
        undecided_budget=_count("--fp8-undecided-budget", values["fp8_undecided_budget"], None, least=0),
        baseline_dir=_anchored(config, Path(str(values["fp8_baseline_dir"] or "baselines"))),
        baselines_from=str(values["fp8_baselines_from"]).strip(),
        report_dir=_anchored(config, Path(str(values["fp8_report_dir"]))) if values["fp8_report_dir"] else None,
        update=update,
        reason=reason,
        processes=_count(
            "--fp8-processes",
            values["fp8_processes"],
            Settings.processes,
            least=LEAST_PROCESSES,
            cause="one process may be slow by chance, so an update stores no speedup of one",
        ),
        base_python=str(values["fp8_base_python"]).strip(),
        base_git=str(values["fp8_base_git"]).strip(),
        weights=_weights(values["fp8_weights"]),
        durations=_truth(values["fp8_durations"], "--fp8-durations"),
        cache_dir=_anchored(config, Path(str(values["fp8_cache_dir"]))) if values["fp8_cache_dir"] else None,
    )


def _warn_of_unknown_variables(config: pytest.Config) -> None:
    """As pytest does of unknown keys in an ini file: a misspelt variable would change nothing without a word. Raises
    :class:`SettingsError` where warnings are errors."""
    known = {option.environment for option in OPTIONS}
    for name in sorted({name for name in os.environ if name.startswith("PYTEST_FP8_")} - known - NO_OPTION):
        import pytest

        try:
            config.issue_config_time_warning(pytest.PytestConfigWarning(f"Unknown environment variable: {name}"), 2)
        except pytest.PytestConfigWarning:
            refuse_unknown(R.UNKNOWN_NAME, f"{name} is no option's environment variable", name, known)


def _reason(config: pytest.Config, reason: str, update: bool) -> str:
    """The reason as it can be stored; raises :class:`SettingsError`. One in the environment may be for other jobs."""
    if update and not reason:
        refuse(
            R.NO_REASON,
            "--fp8-update-baselines needs a reason",
            expected='--fp8-reason "why the stored numbers change"',
            seen="no reason",
            cause="a baseline without a reason cannot be reviewed",
            next_step='pytest --fp8-gpu=h200 --fp8-update-baselines --fp8-reason "torch 2.13"',
        )
    if reason and not update and config.getoption("fp8_reason"):
        refuse(
            R.OPTIONS_EXCLUDE,
            "--fp8-reason stores nothing without --fp8-update-baselines",
            expected="both, or neither",
            seen="a reason alone",
            next_step="add --fp8-update-baselines, or leave the reason out",
        )
    if len(reason) > LONGEST_REASON or not reason.isprintable():
        refuse(
            R.BAD_VALUE,
            "--fp8-reason cannot be stored",
            expected=f"one line of printable text, at most {LONGEST_REASON} characters",
            seen=f"{len(reason)} characters: {reason[:60]!a}",
        )
    return reason


def _value(config: pytest.Config, option: Option) -> Any:
    """What was given. Precedence: option, environment, ini. An empty one of the first two is a variable that nobody
    set: with it a gate would ask nothing."""
    given = config.getoption(option.dest)
    if given in (None, [], False):
        if option.environment not in os.environ:
            return _of_ini(config, option)
        given = os.environ[option.environment]
    for text in given if isinstance(given, list) else [given]:
        if option.dest not in MAY_BE_EMPTY and not str(text).strip():
            refuse(
                R.EMPTY_OPTION,
                f"{option.flag} is given and empty",
                expected=f"{option.flag}={option.metavar}, or nothing at all" if option.metavar else "true or false",
                seen=f"{option.flag}= or {option.environment}=, without a value",
                cause=f"a variable that is not set, as in {option.flag}=$NAME",
                next_step="set the variable, or leave the option out",
            )
    return given


def _of_ini(config: pytest.Config, option: Option) -> Any:
    import pytest

    if option.dest in NO_INI_KEY:
        return ""
    try:
        return config.getini(option.dest)
    except (TypeError, ValueError, pytest.UsageError) as error:
        refuse(
            R.BAD_VALUE,
            f"{option.dest} in the ini file",
            expected={"": "true or false", "N": "a whole number"}.get(option.metavar, option.metavar),
            seen=str(error),
        )


def _truth(value: Any, flag: str) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in TRUE + FALSE:
        refuse(R.BAD_VALUE, f"{flag} in the ini file or the environment", expected="true or false", seen=repr(value))
    return text in TRUE


def _declared(name: str) -> str:
    if name == "auto":
        return name
    from pytest_fp8 import gpu

    return gpu.known(name)


N = TypeVar("N", int, None)


def _count(flag: str, value: Any, default: N, least: int, cause: str = "") -> int | N:
    """``cause``: why no fewer, where that is not plain."""
    text = str(value).strip()
    if not text:
        return default
    if not text.isdecimal() or len(text) > 6 or int(text) < least:
        refuse(
            R.BAD_VALUE,
            flag,
            expected=f"a whole number from {least}, of at most 6 digits",
            seen=repr(value)[:80],
            cause=cause,
        )
    return int(text)


def _undecided(text: str) -> str:
    if text not in ("fail", "warn"):
        refuse(R.BAD_VALUE, "--fp8-undecided", expected="fail or warn", seen=repr(text))
    return text


def _anchored(config: pytest.Config, path: Path) -> Path:
    return path if path.is_absolute() else Path(config.rootpath) / path


def _weights(given: Any) -> dict[str, str]:
    """``--fp8-weights``: model name -> folder, from words ``MODEL=DIR``. Raises :class:`SettingsError`."""
    if not given:
        return {}
    from pytest_fp8.zoo.shapes import SHAPES

    entries = shlex.split(given) if isinstance(given, str) else list(given)
    folders: dict[str, str] = {}
    for entry in entries:
        model, separator, folder = entry.partition("=")
        if not separator or model not in SHAPES:
            refuse(
                R.BAD_VALUE,
                f"--fp8-weights {entry}",
                expected=f"MODEL=DIR with MODEL one of {', '.join(SHAPES)}",
                seen=entry,
            )
        if not (Path(folder) / "config.json").is_file():
            refuse(
                R.NO_WEIGHTS,
                f"--fp8-weights {entry}: that is not a folder of weights",
                expected="a folder with config.json and *.safetensors, as transformers saves them",
                seen=f"no {Path(folder) / 'config.json'}",
                cause="a misspelt path, or a folder that holds another format",
                next_step=f"ls {folder}",
            )
        folders[model] = str(Path(folder).resolve())
    return folders
