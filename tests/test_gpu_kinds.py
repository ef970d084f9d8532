"""GPUs of several kinds on one host, slices of one, and GPUs that cannot be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.fakes import H100, H200, install
from pytest_fp8 import Case
from pytest_fp8 import gpu as gpus
from pytest_fp8.errors import SettingsError
from pytest_fp8.markers import why_not
from pytest_fp8.options import Settings
from pytest_fp8.xdist import share_out

pytest.importorskip("xdist")

KINDS = {"0": "NVIDIA H200", "1": "NVIDIA H200", "2": "NVIDIA H100 80GB HBM3"}
DECLARED = Settings(gpu="h200")


def described(name):
    if name not in KINDS:
        return None, "no NVIDIA GPU (Invalid Argument)"
    return replace(H200, name=KINDS[name]), ""


@pytest.fixture
def see(monkeypatch):
    """Lets programs see GPUs of these indices."""
    monkeypatch.setattr(gpus, "_described", described)
    gpus.unlike.cache_clear()
    yield lambda visible: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus.unlike.cache_clear()


@pytest.mark.parametrize(
    ("visible", "odd"), [("0,1", ""), ("2", ""), ("7,8", ""), ("1,2", "2: NVIDIA H100"), ("0,7", "7: no NVIDIA GPU")]
)
def test_gpus_of_several_kinds_are_told_apart(see, visible, odd):
    see(visible)
    told = gpus.unlike(tuple(gpus.visible()))
    assert odd in told if odd else not told


@pytest.mark.parametrize("settings", [DECLARED, Settings(reason="first")])
@pytest.mark.parametrize("visible", ["1,2", "0,7"])
def test_workers_on_gpus_of_several_kinds_gate_and_store_nothing(see, pytester, settings, visible):
    """Which worker takes a case is chance: the one on the odd GPU would skip it, or store another GPU's figures."""
    see(visible)
    with pytest.raises(SettingsError, match="not all of one kind"):
        share_out(pytester.parseconfig(), settings, 2)
    see("0,1")
    share_out(pytester.parseconfig(), settings, 2)


def test_others_tests_run_on_gpus_of_several_kinds(see, pytester):
    see("1,2")
    share_out(pytester.parseconfig(), Settings(), 2)


def test_no_more_workers_count_than_xdist_starts(see, pytester):
    see("0,1")
    share_out(pytester.parseconfig("--maxprocesses=2"), DECLARED, 8)
    with pytest.raises(SettingsError, match="-n 3 on 2 GPU"):
        share_out(pytester.parseconfig("--maxprocesses=3"), DECLARED, 8)


def test_a_case_of_two_gpus_has_two_of_one_kind(see, monkeypatch):
    install(monkeypatch, H200)
    case = Case("tiny", "torchao", "tensorwise", gpus=2, parallel="ddp")
    see("0,1,2")
    assert not why_not(case, DECLARED)[0]
    see("1,2")
    assert "needs 2 GPUs of one kind, and these are 1: NVIDIA H200, 2: NVIDIA H100" in why_not(case, DECLARED)[0]


@pytest.mark.parametrize(("worker", "says"), [("", "CUDA programs see 1; -k"), ("gw1", "has 1; fewer workers (-n)")])
def test_too_few_gpus_say_what_helps(see, monkeypatch, worker, says):
    install(monkeypatch, H200)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    see("0")
    told = why_not(Case("tiny", "torchao", "tensorwise", gpus=2, parallel="ddp"), DECLARED)[0]
    assert says in told
    assert told.endswith("-k 'not ddp.2' leaves such cases out")


def test_a_slice_of_a_gpu_is_none_of_its_kind():
    sliced = replace(H100, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert sliced.key == "nvidia-h100-80gb-hbm3-mig-1g-10gb"
    assert not gpus.is_kind(sliced, "h100")
    assert gpus.is_kind(sliced, "hopper")
