"""Baseline files that are read: what is written comes back, and what no writer wrote is refused."""

from pathlib import Path

import pytest

from helpers.baselines import edit
from helpers.good_baseline import GOOD, read
from pytest_fp8.baselines.folder import read_folder
from pytest_fp8.baselines.store import baseline_path, write_baseline
from pytest_fp8.baselines.strict import MAX_BYTES
from pytest_fp8.errors import BaselineError


@pytest.fixture
def stored(tmp_path):
    write_baseline(tmp_path, GOOD)
    return tmp_path


def test_what_is_written_is_read(stored):
    assert read(stored) == GOOD
    assert read(stored).values("speedup") == [[0.1, 0.11], [0.12, 0.1]]
    assert read(stored).values("memory_ratio") == []


def test_a_case_without_one_has_none(tmp_path):
    assert read(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a readable baseline"),
        ("[]", "not a record"),
        ("\x00\xff", "not a readable baseline"),
        ('{"schema": 99}', "has another schema"),
        ('{"schema": 1}', "has another schema"),
        ('{"schema": 3, "case": 3}', "lacks 'case_hash'"),
        ('{"schema": NaN}', "NaN is no number"),
        ('{"schema": 1e999}', "1e999 is no number, or too large a one"),
        ("[" * 100_000, "nested too deep"),
        (" " * (MAX_BYTES + 1), f"larger than {MAX_BYTES} bytes"),
    ],
)
def test_a_corrupt_file_is_named(stored, text, says):
    path = baseline_path(stored, "h200", "1b-torchao-rowwise")
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BaselineError) as error:
        read(stored)
    assert str(path) in str(error.value)
    assert says in str(error.value)
    assert "next:" in str(error.value)


def test_a_file_where_a_folder_should_be_is_no_corrupt_baseline(tmp_path):
    (tmp_path / "stored").write_text("no folder")
    with pytest.raises(BaselineError) as error:
        read(tmp_path / "stored")
    assert "cannot be read" in str(error.value)
    assert "edited by hand" not in str(error.value)
    assert error.value.next_step == f"ls -ld {tmp_path / 'stored'}"


def edited(folder, change, **more):
    edit(baseline_path(folder, "h200", GOOD.case), change, **more)


@pytest.mark.parametrize("name", ["case", "case_hash", "gpu", "sessions", "digest"])
def test_a_missing_or_misshapen_field_is_named(stored, name):
    edited(stored, lambda data: data.update({name: 3}), sign=name != "digest")
    with pytest.raises(BaselineError, match=f"baseline.{name} is int, not"):
        read(stored)
    edited(stored, lambda data: data.pop(name), sign=False)
    with pytest.raises(BaselineError, match=f"the baseline lacks '{name}'"):
        read(stored)


ORIGIN = ["date", "commit", "dirty", "gpu", "libraries", "reason", "run", "metrics", "starts", "host_bound"]


@pytest.mark.parametrize("name", [*ORIGIN, "measurement"])
def test_a_missing_or_misshapen_field_of_a_session_is_named(stored, name):
    edited(stored, lambda data: data["sessions"][0].update({name: -3}))
    with pytest.raises(BaselineError, match=rf"sessions\[0\].{name} is (-3|int), not"):
        read(stored)
    edited(stored, lambda data: data["sessions"][0].pop(name))
    with pytest.raises(BaselineError, match=rf"sessions\[0\] lacks '{name}'"):
        read(stored)


def first(**values):
    return lambda data: data["sessions"][0].update(values)


def metrics(**values):
    return lambda data: data["sessions"][0]["metrics"].update(values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.update(extra=1), "the baseline has no field 'extra'"),
        (first(host="mine"), r"sessions\[0\] has no field 'host'"),
        (first(tolerance=0.99), r"sessions\[0\] has no field 'tolerance'"),
        (first(date="yesterday"), "not a date like"),
        (first(date="2026-02-30"), "not a date like"),
        (first(reason="a\x1b[31mb"), "not printable text"),
        (first(reason="x" * 501), "at most 500 characters"),
        (first(dirty=1), "dirty is int, not bool"),
        (first(measurement=True), "measurement is bool, not int"),
        (first(starts=["speedup", "speedup"]), "starts is .* each once"),
        (first(starts=["memory_ratio"]), "starts is .* not some of the session's metrics"),
        (first(gpu={"name": "H200", "serial": "1"}), "gpu has no field 'serial'"),
        (first(libraries={"../x": "1"}), "a name in .*libraries"),
        (lambda data: data.update(sessions=[]), "has 0 values, not 1 to 8"),
        (lambda data: data.update(sessions=data["sessions"] * 9), "has 9 values, not 1 to 8"),
        (lambda data: data.update(case="../x"), "case is '../x', not text like"),
        (metrics(speedup=[0.1, 0.2]), r"speedup\[0\] is float, not a list"),
        (metrics(speedup=[[]]), r"speedup\[0\] has 0 values"),
        (metrics(speedup=[[9.0], [9.0]]), r"speedup\[0\]\[0\] is 9.0, not a number from -4.6"),
        (metrics(speedup=[["0.1"], [0.1]]), r"speedup\[0\]\[0\] is str, not float"),
        (metrics(fp8_share=[1.5]), r"fp8_share\[0\] is 1.5, not a number from 0 to 1"),
        (metrics(fp8_share=[True]), r"fp8_share\[0\] is bool, not float"),
        (metrics(fp8_layers=[1.0]), r"fp8_layers\[0\] is float, not int"),
        (metrics(memory_ratio=[-1]), r"memory_ratio\[0\] is -1, not a number"),
        (metrics(relic=[1]), "metrics has no field 'relic'"),
        (metrics(speedup={"values": [[0.1]], "direction": "lower"}), r"speedup'\] is dict, not a list"),
        (lambda data: data["sessions"][0]["metrics"].clear(), "metrics has 0 values"),
        (lambda data: data["sessions"][0]["metrics"].pop("fp8_ms"), "has a speedup without bf16_ms and fp8_ms"),
        (metrics(fp8_ms=[100.0]), "without bf16_ms and fp8_ms of each of its processes"),
    ],
)
def test_what_no_writer_wrote_is_refused_although_its_digest_fits(stored, change, says):
    edited(stored, change)
    with pytest.raises(BaselineError, match=says):
        read(stored)


@pytest.mark.parametrize(
    "change",
    [metrics(fp8_share=[0.7]), first(date="2026-11-19"), lambda data: data["sessions"].append(data["sessions"][0])],
)
def test_an_edit_by_hand_shows_in_the_digest(stored, change):
    edited(stored, change, sign=False)
    with pytest.raises(BaselineError, match="was edited by hand") as error:
        read(stored)
    assert "measure again" in str(error.value)


def test_what_only_looks_like_a_baseline_is_named_and_not_left_out(stored, tmp_path):
    (stored / "h200/8b-te-block.json").mkdir()
    (stored / "h200/8b-te-block.json/inner.txt").write_text("")
    files = read_folder(stored)
    good = baseline_path(Path(), "h200", GOOD.case)
    assert {str(path) for path, found in files.items() if isinstance(found, BaselineError)} == {
        "h200/8b-te-block.json",
    }
    assert files[good] == GOOD
