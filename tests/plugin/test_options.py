"""Options and ini keys, and what is refused."""

import pytest

from pytest_fp8.gpu import KINDS
from pytest_fp8.options import read_settings

VALUED = ("--fp8-gpu", "--fp8-base", "--fp8-update", "--fp8-baselines")


def settings_of(pytester, *arguments):
    return read_settings(pytester.parseconfig(*arguments))


def test_defaults(pytester):
    settings = settings_of(pytester)
    assert (settings.gpu, settings.strict, settings.update, settings.report_dir) == ("auto", False, False, None)
    assert settings.baseline_dir == pytester.path / "baselines"


@pytest.mark.oldest
def test_an_option_goes_before_the_ini_file(pytester):
    pytester.makeini("[pytest]\nfp8_baselines = stored\nfp8_strict = true\nfp8_report = out")
    settings = settings_of(pytester)
    assert (settings.strict, settings.baseline_dir) == (True, pytester.path / "stored")
    assert settings.report_dir == pytester.path / "out"
    assert settings_of(pytester, "--fp8-baselines=mine").baseline_dir == pytester.path / "mine"
    assert settings_of(pytester, "--fp8-report=").report_dir is None, "none, where the ini file names one"


@pytest.mark.oldest
@pytest.mark.skipif(pytest.version_tuple < (9,), reason="a table with types is pytest 9's")
def test_values_of_an_ini_table_have_types(pytester):
    pytester.makepyprojecttoml("""
        [tool.pytest]
        fp8_strict = true
        fp8_report = "my folder"
        """)
    settings = settings_of(pytester)
    assert (settings.strict, settings.report_dir) == (True, pytester.path / "my folder")


CANNOT_WRITE = ("*seen: *Error*", "*next: *--fp8-report=DIR*")
REFUSED = {
    # As in ``--fp8-gpu=$GPU`` with a variable that nobody set: the gate would ask nothing.
    **{f"{flag}=": [f"*{flag} is given and empty"] for flag in VALUED},
    "--fp8-report=baselines/report": ["*the report is to be written into the folder of the baselines"],
    "--fp8-report=a_file/below": ["*the report cannot be written to *a_file/below", *CANNOT_WRITE],
    "--fp8-report=/proc/nope": ["*the report cannot be written to */proc/nope", *CANNOT_WRITE],
    "--fp8-update=x --fp8-baselines=a_file/below": ["*the baselines cannot be written to *a_file/below*"],
    "--fp8-base=nope": ["*git revision 'nope' of this project cannot be checked out*", "*next: *"],
    "--fp8-update=x --fp8-base=main": ["*exclude each other*"],
    "--fp8-gpu=x100": [
        "*--fp8-gpu=x100: no GPU with FP8 of that name is known*",
        *(f"*expected:*{name}*" for name in KINDS),
    ],
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_no_session_can_do_is_refused_before_a_test_runs(pytester, given):
    pytester.makefile("", a_file="")
    pytester.makepyfile("def test_mine(): print('it ran')")
    result = pytester.runpytest(*given.split(), "-s")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    for line in REFUSED[given]:
        result.stderr.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*it ran*")


def test_what_only_collects_writes_nothing(pytester):
    pytester.makepyfile("def test_mine(): pass")
    given = ("--co", "--fp8-update=x", "--fp8-report=report")
    assert pytester.runpytest(*given).ret == 0
    assert not (pytester.path / "report").exists()
    assert not (pytester.path / "baselines").exists()


def test_a_base_that_nothing_is_timed_beside_is_noted(pytester):
    pytester.makepyfile("def test_mine(): pass")
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        pytester.run(*git, *arguments)
    result = pytester.runpytest("--fp8-base=HEAD")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["FP8-R48: nothing was timed beside the base HEAD: no FP8 test ran on a GPU"])
    pytester.runpytest("--fp8-base=HEAD", "--co").stdout.no_fnmatch_line("*beside the base*")


def test_a_reason_is_stored_as_one_line_of_plain_text(pytester):
    assert settings_of(pytester, "--fp8-update=a\tb\n" + "c" * 900).reason.startswith("a b ccc")
    assert len(settings_of(pytester, "--fp8-update=" + "c" * 900).reason) <= 500


@pytest.mark.oldest
def test_the_header_says_what_is_in_use(pytester):
    pytester.makepyfile("def test_a(): pass")
    pytester.runpytest().stdout.fnmatch_lines(["fp8: *(--fp8-gpu: auto); torch *; baselines: *"])
