"""pytest-xdist on a host with several GPUs: one GPU for each worker, one worker for each case."""

from __future__ import annotations

import json
import textwrap

import pytest

from pytest_fp8 import gpu as gpus
from pytest_fp8.arms.pair import cpu_threads
from pytest_fp8.xdist import model_of, next_unit

pytest.importorskip("xdist")

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
    pynvml.nvmlDeviceGetIndex = lambda handle: handle
    pynvml.nvmlDeviceGetName = lambda handle: "NVIDIA H200"
    pynvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    pynvml.nvmlDeviceGetPowerManagementLimit = lambda handle: 700_000
    pynvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=140 * 2**30)
    pynvml.nvmlSystemGetDriverVersion = lambda: "580.159.04"
    sys.modules["pynvml"] = pynvml
    import pytest_fp8.backends.base as base
    base.Backend.available = lambda self: (True, "")
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
        seen = {"case": case.id, "worker": os.environ["PYTEST_XDIST_WORKER"], "gpu": detect()[0].index,
                "arms see": os.environ.get("CUDA_VISIBLE_DEVICES")}
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
    """A pytester session on a host with that many GPUs, in a process of its own."""
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


@pytest.mark.slow
def test_each_worker_has_a_gpu_and_each_case_a_worker(host):
    result, seen = host(2, "-n2", "--fp8-gpu=h200")
    result.assert_outcomes(passed=12)
    assert len(seen) == 12
    assert {(note["worker"], note["gpu"], note["arms see"]) for note in seen} == {
        ("gw0", 0, "GPU-0"),
        ("gw1", 1, "GPU-1"),
    }
    of_case = {note["case"]: set() for note in seen}
    for note in seen:
        of_case[note["case"]].add(note["worker"])
    assert len(of_case) == 6
    assert all(len(workers) == 1 for workers in of_case.values())


@pytest.mark.slow
def test_the_users_own_choice_of_gpus_is_shared_out(host):
    _, seen = host(4, "-n2", "--fp8-gpu=h200", visible="3,1")
    assert {(note["worker"], note["gpu"], note["arms see"]) for note in seen} == {("gw0", 3, "3"), ("gw1", 1, "1")}


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "workers", "says"), [(2, 3, "*next:*-n 2*"), (1, 2, "*leave -n out*")])
def test_a_gate_whose_workers_would_share_a_gpu_does_not_start(host, gpus, workers, says):
    result, seen = host(gpus, f"-n{workers}", "--fp8-gpu=h200")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*-n {workers} on {gpus} GPU(s)*", says])
    assert seen == []


@pytest.mark.slow
def test_without_a_declared_gpu_nothing_is_refused(host):
    """Others' tests run beside; what is timed on a shared GPU is INVALID by itself."""
    result, seen = host(1, "-n2")
    result.assert_outcomes(passed=12)
    assert {note["arms see"] for note in seen} == {None}


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
    monkeypatch.setattr(gpus, "_conditions", lambda name, own: told[name])
    seen = gpus.conditions(gpus.Gpu("NVIDIA H100", (9, 0), 80, "580", 700.0), set(), 2)
    assert seen == gpus.Conditions(1500, ("software thermal",), (77,))


def shared_out(cases, seconds, workers):
    """Who takes which cases, where each takes so many seconds and a worker's first case of a model takes more."""
    waiting, at = list(cases), {}
    free = dict.fromkeys(range(workers), 0.0)
    taken = {worker: [] for worker in free}
    while waiting:
        worker = min(free, key=free.get)
        mine = at.pop(worker, None)
        case = next_unit(waiting, mine, at.values())
        waiting.remove(case)
        at[worker] = model_of(case)
        free[worker] += seconds[model_of(case)] + (60 if model_of(case) != mine else 0)
        taken[worker].append(case)
    return taken, max(free.values())


def test_the_cases_of_a_model_go_to_as_few_workers_as_keeps_all_busy():
    seconds = {"8b": 75, "1b": 45, "tiny": 12}
    cases = [f"{model}-{number}" for model in seconds for number in range(6)]
    taken, together = shared_out(cases, seconds, 2)
    assert [model_of(case) for case in taken[0]] == ["8b"] * 6, "one worker builds the largest reference, once"
    alone = shared_out(cases, seconds, 1)[1]
    assert together < 0.56 * alone
    assert shared_out(cases, seconds, 4)[1] < 0.4 * alone
    taken, _ = shared_out(cases, seconds, 7)
    assert sorted(case for mine in taken.values() for case in mine) == sorted(cases)


def test_what_a_worker_takes_next():
    waiting = ["8b-a", "8b-b", "1b-a", "tiny-a"]
    assert next_unit(waiting, None, []) == "8b-a"
    assert next_unit(waiting, None, ["8b"]) == "1b-a"
    assert next_unit(waiting, "1b", ["8b"]) == "1b-a"
    assert next_unit(waiting, "tiny", ["8b", "1b"]) == "tiny-a"
    assert next_unit(waiting[:3], "tiny", ["8b", "1b"]) == "8b-a"


def test_arms_on_the_cpu_share_its_cores_with_those_of_other_workers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    threads = {}
    for workers in (1, 2, 16):
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
        threads[workers] = cpu_threads(1), cpu_threads(2)
    assert threads == {1: (8, 4), 2: (4, 2), 16: (1, 1)}


def test_an_update_s_options_are_the_controller_s_and_reach_the_workers(pytester):
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_subprocess("-n1", "--fp8-update-baselines", "--fp8-reason=torch 2.13")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*--fp8-update-baselines was given and nothing was stored: no test asked*"])
    assert result.ret == 1


ORDER = """
    from pathlib import Path
    import pytest
    from pytest_fp8 import Case

    CASES = [Case(m, "torchao", r) for m in ("tiny", "1b", "8b") for r in ("tensorwise", "rowwise")]

    @pytest.mark.fp8(cases=CASES, question="layers")
    def test_layers(fp8_case):
        with Path("order").open("a") as order:
            order.write(fp8_case.model + " ")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "order"),
    [
        (["-n1", "--fp8-gpu=h200"], "8b 8b 1b 1b tiny tiny"),
        (["--fp8-gpu=h200"], "tiny tiny 1b 1b 8b 8b"),
        (["-n1"], "tiny tiny 1b 1b 8b 8b"),
    ],
    ids=["worker of a gate", "gate", "worker"],
)
def test_workers_of_a_gate_begin_with_the_largest_models(host, pytester, monkeypatch, options, order):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(ORDER)
    host(1, *options)[0].assert_outcomes(passed=6)
    assert (pytester.path / "order").read_text().split() == order.split()


CRASHES = """
    import os
    from pathlib import Path
    import pytest
    from pytest_fp8 import Case

    CASES = [Case(m, "torchao", r) for m in ("tiny", "1b", "8b") for r in ("tensorwise", "rowwise")]

    def run(case, question):
        with Path("ran").open("a") as ran:
            ran.write(f"{question}[{case.id}] ")
        if (case.id, question) == ("1b-torchao-rowwise", "layers") and not Path("crashed").exists():
            Path("crashed").touch()
            os._exit(3)

    @pytest.mark.fp8(cases=CASES, question="layers")
    def test_layers(fp8_case):
        run(fp8_case, "layers")
"""
MORE_TESTS = """
    @pytest.mark.fp8(cases=CASES, question="loss")
    def test_loss(fp8_case):
        run(fp8_case, "loss")
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "more",
    # What the scheduler is told of a crash is the same with two tests a case.
    [pytest.param("", id="one test a case", marks=pytest.mark.any_pytest), pytest.param(MORE_TESTS, id="two")],
)
def test_a_worker_that_crashes_takes_no_test_with_it_and_nobody_waits(host, pytester, monkeypatch, workers, more):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(CRASHES + more)
    result, _ = host(workers, f"-n{workers}", "--fp8-gpu=h200")
    ran = (pytester.path / "ran").read_text().split()
    assert len(set(ran)) == (12 if more else 6), "each test ran"
    assert len(set(ran)) == len(ran), "and none twice: one that kills its worker would kill the next"
    result.stdout.fnmatch_lines(["*worker*crashed while running*layers?1b-torchao-rowwise?*"])


CRASHES_ONCE = """
    import os, time
    from pathlib import Path
    import pytest
    from pytest_fp8.gpu import detect

    @pytest.mark.parametrize("number", range(12))
    def test_any(number, worker_id):
        with Path("ran").open("a") as ran:
            ran.write(f"{worker_id} {detect()[0].index} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
        if worker_id == CRASHES:
            os._exit(3)
        # The others leave it something to do.
        deadline = time.monotonic() + 40
        while worker_id != "gw3" and "gw3" not in Path("ran").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("crashes", ["gw0", "gw1", "gw2"])
def test_a_worker_that_stands_in_for_a_crashed_one_takes_its_gpu(host, pytester, monkeypatch, crashes):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(f"CRASHES = {crashes!r}\n" + textwrap.dedent(CRASHES_ONCE))
    host(3, "-n3", "--fp8-gpu=h200")
    ran = {tuple(line.split()) for line in (pytester.path / "ran").read_text().splitlines()}
    number = crashes[-1]
    assert ran == {*((f"gw{each}", each, f"GPU-{each}") for each in "012"), ("gw3", number, f"GPU-{number}")}


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


@pytest.mark.slow
def test_workers_have_disjoint_sets_of_gpus(host):
    _, seen = host(5, "-n2", "--fp8-gpu=h200")
    assert {(note["worker"], note["arms see"]) for note in seen} == {("gw0", "GPU-0,GPU-1"), ("gw1", "GPU-2,GPU-3")}
