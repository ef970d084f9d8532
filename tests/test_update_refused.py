"""--fp8-update where it is refused: who may not, when not, and what is not written over."""

from __future__ import annotations

import pytest

from helpers.baselines import edit
from helpers.fakes import H200, SUITE, install
from helpers.sessions import FILE, update, with_baselines
from pytest_fp8.baselines.atomic import updating
from pytest_fp8.baselines.update import too_few
from pytest_fp8.ci import ci_variable
from pytest_fp8.errors import BaselineError
from pytest_fp8.options import FRESH_PAIRS
from pytest_fp8.stats.looks import RUNS_TO_FAIL


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE)
    return pytester


@pytest.fixture
def stored(suite, monkeypatch):
    return with_baselines(suite, monkeypatch)


@pytest.mark.parametrize("value", ["", "0", "false", "False", "no"])
def test_a_variable_that_says_no_is_not_ci(value):
    assert ci_variable({"CI": value}) == ""


@pytest.mark.parametrize("test", ["layers or speedup", "layers or faster"])
def test_a_shared_gpu_is_no_place_to_measure_a_baseline(stored, monkeypatch, test):
    before = (stored.path / FILE).read_bytes()
    install(monkeypatch, H200, strangers=(4242,), speedup=1.4)
    result = stored.runpytest(*update("again", "-k", f"({test}) and rowwise"))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*was not updated: the timing is invalid (another process used the GPU)*"])
    assert (stored.path / FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "why"),
    [({"nan_at": 20}, "the loss question failed"), ({"executed_roles": ("fprop",)}, "FP8 was not shown to run")],
)
def test_a_failing_question_leaves_the_stored_file(stored, monkeypatch, change, why):
    before = (stored.path / FILE).read_bytes()
    install(monkeypatch, H200, speedup=1.4, **change)
    result = stored.runpytest(*update("again", "-k", "rowwise"))
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*was not updated: {why}*"])
    assert (stored.path / FILE).read_bytes() == before


def test_one_process_is_no_evidence():
    assert FRESH_PAIRS >= RUNS_TO_FAIL
    assert not too_few([[0.1]] * 2)
    assert too_few([[0.2]])


@pytest.mark.parametrize("schema", [4, "3", None], ids=["newer", "text", "none"])
def test_what_a_newer_version_may_have_written_is_not_written_over(stored, schema):
    edit(stored.path / FILE, lambda data: data.update(schema=schema) if schema else data.pop("schema"))
    before = (stored.path / FILE).read_text()
    result = stored.runpytest(*update("again"))
    assert result.ret == 1
    if schema:
        result.stdout.fnmatch_lines(["*tiny-torchao-rowwise.json has another schema*"])
    assert (stored.path / FILE).read_text() == before


@pytest.mark.parametrize("text", ["{", "<<<<<<< HEAD", None], ids=["cut", "merged", "edited"])
def test_a_history_that_cannot_be_read_is_not_written_over(stored, text):
    file = stored.path / FILE
    if text is None:
        edit(file, lambda data: data.update(digest="0" * 64), sign=False)
    else:
        file.write_text(text)
    before = file.read_text()
    result = stored.runpytest(*update("again"))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise.json *", "*git*"])
    assert file.read_text() == before


def test_an_update_that_stores_nothing_fails_and_says_why(stored, monkeypatch):
    install(monkeypatch, None)
    result = stored.runpytest("--fp8-update=none")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*nothing was stored: needs a GPU with FP8 tensor cores: no NVIDIA GPU (fake)*"])


def test_no_other_run_can_update_until_all_is_written(suite, monkeypatch):
    install(monkeypatch, H200)
    written = []

    def write(path, text):
        with pytest.raises(BaselineError, match="another run is updating"), updating(suite.path / "baselines"):
            pass
        written.append(path.stem)

    monkeypatch.setattr("pytest_fp8.baselines.store.write_atomically", write)
    assert suite.runpytest(*update()).ret == 0
    assert written == ["tiny-torchao-rowwise", "tiny-te-current"]
    with updating(suite.path / "baselines"):
        pass


def test_a_folder_that_cannot_be_made_is_a_usage_error_at_the_start(suite, monkeypatch):
    install(monkeypatch, H200)
    (suite.path / "a_file").write_text("")
    result = suite.runpytest(*update(), "--fp8-baselines=a_file/below")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*cannot be updated*", "*NotADirectoryError*", "*--fp8-baselines*"])
