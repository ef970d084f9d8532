"""pytest-xdist on a host with several GPUs: which of them each worker has, and what is refused."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("xdist")

import matrix
from pytest_fp8 import gpu as gpus
from pytest_fp8.arms.pair import cpu_threads
from pytest_fp8.xdist import case_of

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


@pytest.fixture
def host(pytester, monkeypatch):
    """A function that runs the session on a host with that many GPUs, in a process of its own."""
    pytester.makeconftest(DRIVER)
    pytester.makepyfile(SUITE)

    def run(gpus, *options):
        monkeypatch.setenv("FAKE_GPUS", str(gpus))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options, timeout=60)
        return result, [json.loads(path.read_text()) for path in sorted(pytester.path.glob("*-*.json"))]

    return run


@pytest.mark.slow
def test_workers_tests_are_told_of_without_any_option(host):
    """The process that writes the summary collects nothing itself."""
    result, _ = host(0, "-n1")
    result.stdout.fnmatch_lines(["*= FP8 =*", "12 not run: needs a GPU*"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "seen_by"),
    [
        pytest.param(2, {("gw0", "GPU-0"), ("gw1", "GPU-1")}, marks=pytest.mark.oldest),
        pytest.param(5, {("gw0", "GPU-0,GPU-1"), ("gw1", "GPU-2,GPU-3")}, marks=pytest.mark.nightly),
    ],
)
def test_workers_have_disjoint_sets_of_gpus_and_each_case_a_worker(host, gpus, seen_by):
    result, seen = host(gpus, "-n2", "--fp8-gpu=h200")
    result.assert_outcomes(passed=12)
    assert len(seen) == 12
    assert {note["gpu"] for note in seen} == {"NVIDIA H200"}
    assert {(note["worker"], note["arms see"]) for note in seen} == seen_by
    assert len({note["case"] for note in seen}) == len({(note["case"], note["worker"]) for note in seen}) == 6


@pytest.mark.parametrize(
    ("named", "seen"), [("0,2", ["0", "2"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]), ("1,-1,2", ["1"]), ("", [])]
)
def test_what_cuda_would_see(monkeypatch, named, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpus.visible() == seen


def test_conditions_of_several_gpus_are_those_of_the_worst(monkeypatch):
    told = {
        "0": gpus.Conditions(1980, (), ()),
        "3": gpus.Conditions(1500, ("software thermal",), (77,)),
        "1": gpus.Conditions(100, (), (99,)),
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,1")
    monkeypatch.setattr(gpus, "_handle", lambda name: name)
    monkeypatch.setattr(gpus, "_conditions", lambda name, *_: told[name])
    seen = gpus.conditions(set(), 0, 2)
    assert seen == gpus.Conditions(1500, ("software thermal",), (77,))


PARALLEL = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "tensorwise", gpus=2, parallel="ddp")])
    def test_two(fp8_case): pass

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "tensorwise")])
    def test_one(fp8_case): pass
"""
TOO_FEW = "*tiny-torchao-tensorwise-ddp.2 needs 2 GPUs, and CUDA programs see 1; -k 'not ddp.2'*"


@pytest.mark.slow
def test_too_few_gpus_fail_on_a_declared_runner_and_are_a_reason_elsewhere(host, pytester, monkeypatch):
    # These tests may themselves run in a worker.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(PARALLEL)
    host(2, "--fp8-gpu=h200")[0].assert_outcomes(passed=2)
    declared, _ = host(1, "--fp8-gpu=h200")
    declared.assert_outcomes(passed=1, errors=1)
    declared.stdout.fnmatch_lines([TOO_FEW, "*expected: everything that case*"])
    auto, _ = host(1, "-rs")
    auto.assert_outcomes(passed=1, skipped=1)
    auto.stdout.fnmatch_lines([TOO_FEW])


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("t/a.py::t[cpu]", "t/a.py::t[cpu]"),
        ("t/a.py::t", "t/a.py::t"),
        ("t/f.py::t[own-torchao-tensorwise]", "own-torchao-tensorwise"),
        ("t/f.py::t[own-torchao-tensorwise-loss]", "own-torchao-tensorwise"),
        ("t/f.py::t[own.my-net-te-current-eager-faster]", "own.my-net-te-current-eager"),
        ("t/f.py::t[8b16-te-current-fsdp2.2-4x4096]", "8b16-te-current-fsdp2.2-4x4096"),
        ("t/f.py::t[1b-bf16]", "1b-bf16"),
    ],
)
def test_tests_of_one_case_go_together_and_no_others(nodeid, unit):
    assert case_of(nodeid) == unit


def test_the_cases_of_the_suite_are_told_from_other_parameters():
    for case in matrix.ALL:
        assert case_of(f"suites/test_questions.py::test_layers[{case.id}]") == case.id


def test_arms_on_the_cpu_share_its_cores_with_those_of_other_workers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    threads = {}
    for workers in (1, 2, 16):
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
        threads[workers] = cpu_threads(1), cpu_threads(2)
    assert threads == {1: (4, 2), 2: (2, 1), 16: (1, 1)}, "two arms beside each other"
