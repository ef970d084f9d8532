"""A host with too few GPUs, and slices of one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.fakes import H100, H200, install
from pytest_fp8 import Case
from pytest_fp8 import gpu as gpus
from pytest_fp8.markers import why_not
from pytest_fp8.options import Settings

pytest.importorskip("xdist")

DECLARED = Settings(gpu="h200")


def test_too_few_gpus_say_what_helps(monkeypatch):
    install(monkeypatch, H200)
    case = Case("tiny", "torchao", "tensorwise", gpus=2, parallel="ddp")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "CUDA programs see 1; -k 'not ddp.2' leaves such cases out" in why_not(case, DECLARED)[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert not why_not(case, DECLARED)[0]


def test_a_slice_of_a_gpu_is_none_of_its_kind():
    sliced = replace(H100, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert sliced.key == "nvidia-h100-80gb-hbm3-mig-1g-10gb"
    assert not gpus.is_kind(sliced, "h100")
    assert gpus.is_kind(sliced, "hopper")
