"""Options, environment and ini file: each by its three names, and what is refused."""

import sys

import pytest

from pytest_fp8.gpu import NAMES
from pytest_fp8.options import MAY_BE_EMPTY, NO_INI_KEY, OPTIONS, read_settings


def settings_of(pytester, *arguments):
    return read_settings(pytester.parseconfig(*arguments))


def test_defaults(pytester):
    settings = settings_of(pytester)
    assert (settings.gpu, settings.strict, settings.update, settings.report_dir) == ("auto", False, False, None)
    assert settings.baseline_dir == pytester.path / "baselines"


@pytest.mark.oldest
def test_an_option_beats_the_environment_which_beats_the_ini_file(pytester, monkeypatch):
    pytester.makeini("[pytest]\nfp8_gpu = h100\nfp8_strict = true")
    assert settings_of(pytester).gpu == "h100"
    assert settings_of(pytester).strict
    monkeypatch.setenv("PYTEST_FP8_GPU", "h200")
    monkeypatch.setenv("PYTEST_FP8_STRICT", "0")
    assert settings_of(pytester).gpu == "h200"
    assert not settings_of(pytester).strict
    assert settings_of(pytester, "--fp8-gpu=hopper", "--fp8-strict").gpu == "hopper"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.dest)
def test_every_option_is_in_the_help(pytester, option):
    result = pytester.runpytest("--help")
    result.stdout.fnmatch_lines([f"*{option.flag}*"])
    if option.dest not in NO_INI_KEY:
        result.stdout.fnmatch_lines([f"*{option.dest} (*)*"])


@pytest.mark.parametrize(
    "option", [one for one in OPTIONS if one.metavar and one.dest not in MAY_BE_EMPTY], ids=lambda o: o.dest
)
def test_a_value_that_is_given_and_empty_is_refused(pytester, monkeypatch, option):
    """As in ``--fp8-gpu=$GPU`` with a variable that nobody set: the gate would ask nothing."""
    pytester.makepyfile("def test_mine(): pass")
    typed = pytester.runpytest(f"{option.flag}=")
    assert typed.ret == pytest.ExitCode.USAGE_ERROR
    typed.stderr.fnmatch_lines([f"*{option.flag} is given and empty"])
    monkeypatch.setenv(option.environment, "")
    set_so = pytester.runpytest()
    assert set_so.ret == pytest.ExitCode.USAGE_ERROR
    set_so.stderr.fnmatch_lines([f"*{option.flag} is given and empty", f"*{option.environment}=*"])


@pytest.mark.parametrize("option", [one for one in OPTIONS if not one.metavar], ids=lambda o: o.dest)
def test_a_switch_whose_variable_is_empty_is_refused(pytester, monkeypatch, option):
    pytester.makepyfile("def test_mine(): pass")
    monkeypatch.setenv(option.environment, "")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{option.flag} is given and empty", "*true or false*"])


def test_a_report_among_the_baselines_is_refused(pytester):
    pytester.makepyfile("def test_mine(): pass")
    for options in (
        ["--fp8-report-dir=baselines/report"],
        ["--fp8-report-dir=out", "--fp8-baseline-dir=out/candidates"],
    ):
        result = pytester.runpytest(*options)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*the report is to be written into the folder of the baselines"])


def test_a_folder_of_compiled_code_is_looked_at(pytester):
    pytester.makefile("", a_file="")
    pytester.makepyfile("def test_mine(): pass")
    result = pytester.runpytest("--fp8-cache-dir=a_file/below")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*compiled code cannot be written to *a_file/below", "*--fp8-cache-dir=DIR*"])


@pytest.mark.parametrize("below", ["a_file/below", "/proc/nope"])
def test_a_report_that_cannot_be_written_is_refused_at_the_start(pytester, below):
    pytester.makefile("", a_file="")
    pytester.makepyfile("def test_mine(): print('it ran')")
    result = pytester.runpytest(f"--fp8-report-dir={below}", "-s")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    says = f"*the report cannot be written to *{below}"
    result.stderr.fnmatch_lines([says, "*seen: *Error*", "*next: *--fp8-report-dir=DIR*"])
    result.stdout.no_fnmatch_line("*it ran*")


def test_what_only_collects_writes_nothing(pytester):
    pytester.makepyfile("def test_mine(): pass")
    given = ("--co", "--fp8-update-baselines", "--fp8-reason=x", "--fp8-report-dir=report")
    assert pytester.runpytest(*given).ret == 0
    assert not (pytester.path / "report").exists()
    assert not (pytester.path / "baselines").exists()


def test_a_base_that_nothing_is_timed_beside_is_noted(pytester):
    pytester.makepyfile("def test_mine(): pass")
    option = f"--fp8-base-python={sys.executable}"
    result = pytester.runpytest(option)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["FP8-R48: nothing was timed beside the base *: no FP8 test ran on a GPU"])
    pytester.runpytest(option, "--co").stdout.no_fnmatch_line("*beside the base*")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--fp8-base-git=nope", "*git revision 'nope' of this project cannot be checked out*"),
        ("--fp8-base-python=nope", "*base: there is no Python at nope*"),
        ("--fp8-base-python=.", "*base: there is no Python at .*"),
        ("--fp8-base-python=/bin/true", "*base: /bin/true is no Python*"),
        ("--fp8-base-python=/bin/ls", "*base: /bin/ls is no Python*"),
    ],
)
def test_a_base_that_is_not_there_is_said_at_once_on_any_machine(pytester, option, says):
    pytester.makepyfile("def test_mine(): print('it ran')")
    result = pytester.runpytest(option, "-s")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([says, "*next: *"])
    result.stdout.no_fnmatch_line("*it ran*")


UPDATE = ("--fp8-update-baselines", "--fp8-reason=mine", "--fp8-update-in-ci")


@pytest.mark.parametrize("key", NO_INI_KEY)
def test_an_ini_file_has_no_key_for_what_is_set_for_one_run(pytester, key):
    pytester.makeini(f"[pytest]\n{key} = 1")
    pytester.makepyfile("def test_mine(): pass")
    result = pytester.runpytest("--strict-config")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*Unknown config option: {key}*"])


def test_an_argument_file_gives_what_it_holds(pytester):
    (pytester.path / "args.txt").write_text("\n".join(UPDATE))
    assert settings_of(pytester, "@args.txt").update


@pytest.mark.oldest
@pytest.mark.skipif(pytest.version_tuple < (9,), reason="a table with types is pytest 9's")
def test_values_of_an_ini_table_have_types(pytester):
    folder = pytester.mkdir("my folder")
    (folder / "config.json").write_text("{}")
    pytester.makepyprojecttoml(
        """
        [tool.pytest]
        fp8_strict = true
        fp8_durations = false
        fp8_processes = 6
        fp8_gpu = "h100"
        fp8_weights = ["8b=my folder"]
        """
    )
    settings = settings_of(pytester)
    assert (settings.strict, settings.durations, settings.processes, settings.gpu) == (True, False, 6, "h100")
    assert settings.weights == {"8b": str(folder)}


@pytest.mark.parametrize(("key", "value"), [("fp8_strict", "perhaps"), ("fp8_processes", "many")])
def test_a_value_of_an_ini_file_that_is_none_is_refused(pytester, key, value):
    pytester.makeini(f"[pytest]\n{key} = {value}")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{key.replace('_', '?')}*"])


@pytest.mark.parametrize("given", ["ini", "environment"])
def test_a_folder_of_weights_may_have_a_space_in_its_name(pytester, monkeypatch, given):
    folder = pytester.mkdir("my folder")
    (folder / "config.json").write_text("{}")
    if given == "ini":
        pytester.makeini("[pytest]\nfp8_weights = 8b='my folder' tiny='my folder'")
    else:
        monkeypatch.setenv("PYTEST_FP8_WEIGHTS", "8b='my folder' tiny='my folder'")
    assert settings_of(pytester).weights == dict.fromkeys(("8b", "tiny"), str(folder))


def test_a_variable_that_arms_are_given_is_no_misspelt_one(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_FP8_NOT_FROM", "/somewhere")
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest().stdout.no_fnmatch_line("*Unknown environment variable*")


def test_the_command_line_and_the_environment_do(pytester, monkeypatch):
    assert settings_of(pytester, *UPDATE).update
    monkeypatch.setenv("PYTEST_ADDOPTS", "--fp8-update-baselines '--fp8-reason=torch 2.13'")
    assert settings_of(pytester).reason == "torch 2.13"
    monkeypatch.delenv("PYTEST_ADDOPTS")
    monkeypatch.setenv("PYTEST_FP8_BASELINES_FROM", "main")
    assert settings_of(pytester).baselines_from == "main"


@pytest.mark.parametrize("reason", ["x" * 501, "a\tb", "a\x1b[31mb"])
def test_a_reason_that_cannot_be_stored_is_refused_before_anything_is_measured(pytester, reason):
    result = pytester.runpytest("--fp8-update-baselines", f"--fp8-reason={reason}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fp8-reason cannot be stored*"])


def test_a_reason_alone_would_store_nothing_and_is_refused(pytester, monkeypatch):
    result = pytester.runpytest("--fp8-reason=nightly", "--fp8-update-in-ci")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fp8-reason stores nothing without --fp8-update-baselines*", "*next: *"])
    # Of a workflow with several jobs.
    monkeypatch.setenv("PYTEST_FP8_REASON", "nightly")
    pytester.makepyfile("def test_mine(): pass")
    assert pytester.runpytest().ret == 0


def test_an_update_reads_no_other_baselines(pytester):
    result = pytester.runpytest("--fp8-update-baselines", "--fp8-reason=x", "--fp8-baselines-from=main")
    result.stderr.fnmatch_lines(["*exclude each other*"])


def test_an_unknown_gpu_is_refused_with_the_known_ones(pytester):
    result = pytester.runpytest("--fp8-gpu=x100")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fp8-gpu=x100: no GPU of that name is known*"])
    for name in NAMES:
        result.stderr.fnmatch_lines([f"*expected:*{name}*"])


def test_an_update_needs_a_reason(pytester):
    result = pytester.runpytest("--fp8-update-baselines")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fp8-update-baselines needs a reason*"])


@pytest.mark.parametrize("value", ["9b=/tmp", "tiny", "tiny=/nowhere/at/all"])
def test_weights_that_are_not_there_are_refused(pytester, value):
    result = pytester.runpytest(f"--fp8-weights={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--fp8-weights {value}*"])


def test_a_word_that_is_neither_true_nor_false(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_FP8_STRICT", "perhaps")
    result = pytester.runpytest()
    result.stderr.fnmatch_lines(["*--fp8-strict*", "*true or false*"])


@pytest.mark.oldest
def test_the_header_says_what_is_in_use(pytester):
    pytester.makepyfile("def test_a(): pass")
    pytester.runpytest().stdout.fnmatch_lines(["fp8: *(--fp8-gpu: auto); torch *; baselines: *"])


def test_the_header_says_so_where_there_is_no_such_folder_of_baselines(pytester):
    pytester.mkdir("there")
    for name, says in (("thre", "none, there is no folder thre"), ("there", "there")):
        pytester.runpytest(f"--fp8-baseline-dir={name}").stdout.fnmatch_lines([f"fp8: *; baselines: {says}"])


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "two workers"])
def test_a_misspelt_variable_is_warned_of_once(pytester, monkeypatch, workers):
    monkeypatch.setenv("PYTEST_FP8_STRIKT", "1")
    monkeypatch.setenv("PYTEST_FP8_COMMIT", "abc")
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_subprocess(*workers)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*Unknown environment variable: PYTEST_FP8_STRIKT*"])


def test_a_misspelt_variable_is_one_clear_error_where_warnings_are_errors(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_FP8_STRIKT", "1")
    result = pytester.runpytest_subprocess("-W", "error")
    result.stderr.fnmatch_lines(["*PYTEST_FP8_STRIKT is no option's*", "*did you mean 'PYTEST_FP8_STRICT'*"])
    result.stderr.no_fnmatch_line("*INTERNALERROR*")
