"""What NVML says of a GPU while arms are timed on it: whose processes are there, and what it does not tell."""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace

import pytest

from helpers.fakes import H200, install, pairs, spares
from pytest_fp8 import gpu as gpus
from pytest_fp8.arms.environment import arm_env
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.gpu import CLOCKS, NEIGHBOURS, Conditions, conditions, strangers
from pytest_fp8.session import Session


class NvmlError(Exception):
    pass


def unsupported(*_):
    raise NvmlError("Not Supported")


@pytest.fixture
def nvml(monkeypatch):
    """NVML that finds an H100 with nobody on it; a test replaces its functions."""
    fake = SimpleNamespace(
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: int(name.removeprefix("GPU-")),
        nvmlDeviceGetClockInfo=lambda *_: 1980,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [],
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
    return fake


def on_gpu(*pids):
    return lambda _: [SimpleNamespace(pid=pid) for pid in pids]


def test_what_an_arm_has_started_is_no_stranger(monkeypatch):
    sessions = {100: 100, 101: 100, 102: 100, 900: 900}
    monkeypatch.setattr("os.getsid", lambda pid: sessions[pid])
    assert strangers([100, 101, 102], own={100}, contexts=1) == ()
    assert strangers([100, 101, 900], own={100}, contexts=1) == (900,)


def test_in_a_container_only_a_surplus_is_strange():
    assert strangers([70001, 70002], own={4, 5}, contexts=2) == ()
    assert strangers([70001, 70002, 70003], own={4, 5}, contexts=2) == (70003,)


def test_a_process_that_waits_hides_no_stranger(monkeypatch, nvml):
    """It has imported its libraries and has no memory of the GPU."""
    world = install(monkeypatch, H200)
    # install() replaces it: here it is what is tested.
    monkeypatch.setattr("pytest_fp8.plan.conditions", conditions)
    pool = ArmPool(H200)
    [one] = pairs(pool, "8b", "tensorwise")
    one.start()
    assert spares(world)
    nvml.nvmlDeviceGetComputeRunningProcesses = on_gpu(9001, 9002)
    assert one.conditions() == Conditions(1980)
    nvml.nvmlDeviceGetComputeRunningProcesses = on_gpu(9001, 9002, 9003)
    assert one.conditions().strangers == (9003,)
    pool.close()


def test_what_nvml_does_not_tell_is_unknown_and_not_quiet(nvml):
    assert conditions({1}, 1).unknown == (NEIGHBOURS,), "an arm is there and is not listed"
    assert conditions(set(), 0).unknown == ()
    nvml.nvmlDeviceGetClockInfo = unsupported
    nvml.nvmlDeviceGetComputeRunningProcesses = unsupported
    assert conditions({1}, 1).unknown == (CLOCKS, NEIGHBOURS)
    nvml.nvmlDeviceGetHandleByUUID = unsupported
    assert conditions({1}, 1).unknown == (CLOCKS, NEIGHBOURS), "a GPU that was lost"


def test_arms_count_gpus_as_nvml_does(monkeypatch, nvml, tmp_path):
    """On a host with a T4 before an H100, CUDA by itself takes the fastest for its first."""
    names = {0: ("Tesla T4", (7, 5)), 1: ("NVIDIA H100 PCIe", (9, 0))}
    nvml.nvmlDeviceGetName = lambda index: names[index][0]
    nvml.nvmlDeviceGetCudaComputeCapability = lambda index: names[index][1]
    nvml.nvmlDeviceGetPowerManagementLimit = unsupported
    nvml.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(total=1)
    nvml.nvmlSystemGetDriverVersion = lambda: "580"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    for visible, name in ((None, "Tesla T4"), ("1", "NVIDIA H100 PCIe")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        gpus.detect.cache_clear()
        assert gpus.detect()[0].name == name
        assert arm_env("bf16", tmp_path)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", os.environ
    gpus.detect.cache_clear()


@pytest.mark.parametrize(("held", "strange"), [(True, ()), (False, (9001,))])
def test_a_model_in_pytests_own_process_is_no_stranger(monkeypatch, nvml, held, strange):
    """As the fixture ``fp8_model`` holds one; also where the driver gives other process ids than those seen here."""
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: held))
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    nvml.nvmlDeviceGetComputeRunningProcesses = on_gpu(9001)
    assert conditions(set(), 0).strangers == strange
    nvml.nvmlDeviceGetComputeRunningProcesses = on_gpu(os.getpid(), 7)
    assert conditions({7}, 1).strangers == (() if held else (os.getpid(),))


def test_a_test_leaves_no_memory_of_its_model(monkeypatch):
    class Model:
        def __init__(self):
            self.itself = self

    model, given_back = Model(), []
    alive = weakref.ref(model)
    del model
    cuda = SimpleNamespace(is_initialized=lambda: True, empty_cache=lambda: given_back.append(alive()))
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(cuda=cuda))
    Session.pytest_runtest_logfinish(SimpleNamespace())
    assert given_back == [None], "what holds itself is collected first"
