"""A pytester session on a host with several GPUs, for tests of pytest-xdist's workers."""

from __future__ import annotations

import json

# A driver that every process of the inner session believes in: H200s, as many as FAKE_GPUS says.
DRIVER = """
    import os, sys, types

    class NVMLError(Exception): ...

    def handle_by_uuid(uuid):
        return int(uuid.rpartition("-")[2])

    pynvml = types.ModuleType("pynvml")
    pynvml.NVMLError = NVMLError
    pynvml.nvmlInit = lambda: None
    pynvml.nvmlDeviceGetCount = lambda: int(os.environ["FAKE_GPUS"])
    pynvml.nvmlDeviceGetHandleByIndex = lambda index: index
    pynvml.nvmlDeviceGetHandleByUUID = handle_by_uuid
    pynvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    pynvml.nvmlDeviceGetName = lambda handle: "NVIDIA H200"
    pynvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    pynvml.nvmlDeviceGetPowerManagementLimit = lambda handle: 700_000
    pynvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=140 * 2**30)
    pynvml.nvmlSystemGetDriverVersion = lambda: "580.159.04"
    sys.modules["pynvml"] = pynvml
    import pytest_fp8.recipes as recipes
    recipes.BackendFacts.available = lambda self: (True, "")
"""
SUITE = """
    import json, os
    from pathlib import Path
    import pytest
    from pytest_fp8 import Case
    from pytest_fp8.gpu import detect

    CASES = [Case("tiny", "torchao", r) for r in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]
    CASES += [Case("tiny", "transformer_engine", r) for r in ("delayed", "current", "block")]

    def note(what, case):
        seen = {"case": case.id, "worker": os.environ["PYTEST_XDIST_WORKER"],
                "gpu": detect()[0].name, "arms see": os.environ.get("CUDA_VISIBLE_DEVICES")}
        Path(f"{what}-{case.id}.json").write_text(json.dumps(seen))

    @pytest.mark.fp8(cases=CASES, question="layers")
    def test_layers(fp8_case):
        note("layers", fp8_case)

    @pytest.mark.fp8(cases=CASES, question="loss")
    def test_loss(fp8_case):
        note("loss", fp8_case)
"""


def session_on_gpus(pytester, monkeypatch):
    """A function that runs the session on a host with that many GPUs, in a process of its own."""
    pytester.makeconftest(DRIVER)
    pytester.makepyfile(SUITE)

    def run(gpus, *options, visible=None):
        monkeypatch.setenv("FAKE_GPUS", str(gpus))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options, timeout=60)
        return result, [json.loads(path.read_text()) for path in sorted(pytester.path.glob("*-*.json"))]

    return run
