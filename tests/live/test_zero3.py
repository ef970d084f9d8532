"""Arms under DeepSpeed's ZeRO-3, on a CPU with gloo. They need DeepSpeed, which the other tests do without."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from helpers.arms import micro, own
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.shipping import ship, unship

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")]
STEPS = 6


@pytest.fixture(scope="module")
def on_one():
    """The curve of one process on the whole batch."""
    process = ArmProcess(fork=True)
    process.build(ArmSpec(micro(), "cpu", threads=1))
    yield process.request("curve", seed=1, steps=STEPS)
    process.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "converted"), [("torchao", 14), ("accelerate_torchao", 13), ("accelerate_bf16", 0)]
)
def test_it_trains_as_one_process_and_its_products_are_seen(on_one, backend, converted):
    arm = ArmProcess(fork=True, device="cpu", ranks=2)
    try:
        arm.build(ArmSpec(micro("zero3", backend), "cpu", threads=1))
        curve = arm.request("curve", seed=1, steps=STEPS)
        # Its master weights are float32.
        assert curve["losses"] == pytest.approx(on_one["losses"], rel=0.01)
        assert curve["gradient_norms"] == pytest.approx(on_one["gradient_norms"], rel=0.05)
        # Small weights are not parted, but have master weights, too: a curve must not begin where the last one ended.
        again = arm.request("curve", seed=1, steps=STEPS, jitter=True)
        assert again["losses"] != curve["losses"]
        assert again["losses"] == pytest.approx(curve["losses"], rel=0.005)
        layers = arm.request("layers")
        assert len(layers["live_fp8"]) == converted
        assert arm.request("ledger")["optimizer"]["kind"].endswith("ZeroOptimizer"), "backward and step are two calls"
        assert arm.request("ledger")["after"]["lm_head.weight"]["shape"] == [256, 64], "that of the whole tensor"
        assert arm.request("ledger")["loss"] == pytest.approx(arm.request("curve", seed=0, steps=1)["losses"][0])
    finally:
        arm.close()


@pytest.mark.nightly
def test_nothing_is_compiled_for_it(monkeypatch, tmp_path):
    """DeepSpeed's own collectives through shared memory: a minute, and an error without a compiler."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    arm = ArmProcess(device="cpu", ranks=2)
    try:
        arm.build(own("zero3"))
    finally:
        arm.close()
    assert not list(tmp_path.iterdir())


def test_it_carries_weights_and_optimizer_of_which_each_rank_has_a_part(tmp_path):
    """Of tiny's 39 tensors, sketches alone took 7 s."""

    def build():
        from torch import nn

        return nn.Sequential(nn.Linear(32, 4096), nn.GELU(), nn.Linear(4096, 32), nn.GELU(), nn.Linear(32, 32))

    arm = ArmProcess(fork=True, device="cpu", ranks=2)
    try:
        arm.build(own("zero3", "accelerate_torchao", build=build))
        assert arm.request("layers")["live_fp8"] == ["2"], "Accelerate leaves the first and the last layer"
        movement = arm.request("curve", seed=0, steps=2)["movement"]
        assert set(movement) == {f"{layer}.{name}" for layer in (0, 2, 4) for name in ("weight", "bias")}
        for name in ("0.weight", "2.weight", "4.weight"):
            # Its biases begin at random, its weights as the suite's; the last part is filled up.
            assert movement[name]["reached"] > 0.9, name
            assert movement[name]["moved"] > 0.3, name
        parted = ship(lambda model: sum(not weight.numel() for weight in model.parameters()), "a function")
        assert unship(arm.request("call", function=parted)) == 2, "the others are below DeepSpeed's threshold"
        seen = arm.request("numerics", moved=True)
        moved, before = seen["moved"]["sketches"], seen["gradients"]["sketches"]
        assert moved["2.weight"] != before["2.weight"], "moved weights are those in parts"
        arm.request("curve", seed=0, steps=2)
        for store in ("safetensors", "dcp"):
            folder = str(tmp_path / store)
            saved = arm.request("save", folder=folder, store=store, optimizer=True)
            assert {key.rpartition("/")[2] for key in saved["optimizer_digests"]} == {
                "master",
                "step",
                "exp_avg",
                "exp_avg_sq",
            }
            after = arm.request("resume", seed=0, first_step=2, steps=2)
            assert any(saved["digests"].values())
            loaded = arm.request("load", folder=folder, store=store, optimizer=True, seed=0)
            assert loaded["digests"] == saved["digests"]
            assert loaded["optimizer_digests"] == saved["optimizer_digests"]
            assert arm.request("resume", seed=0, first_step=2, steps=2)["losses"] == after["losses"]
            arm.request("load", folder=folder, store=store, optimizer=True, seed=0)
    finally:
        arm.close()


GATHERED_AHEAD = """
from types import SimpleNamespace

import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from pytest_fp8.backends import zero
from pytest_fp8.backends.base import Conversion, Prepared
from pytest_fp8.worker.tensors import held

# Each weight is given up after its use and gathered before the next, as those of a large model are.
zero.CONFIG["zero_optimization"] |= {
    "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 5000
}
way = zero.Zero3()
way.join(torch.device("cpu"))
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]).to(torch.bfloat16)
setup = SimpleNamespace(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
made = way.parallelize(Prepared(model, Conversion()), lambda: None, setup)
call, optimizer, backward = made.wrapped, made.optimizer, made.backward
rows = torch.ones(8, 64, dtype=torch.bfloat16)
outputs = []
for value in (0.01, 0.02):
    for _ in range(3):
        backward(call(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(rows)
    way.settle(model)
    for parameter in model.parameters():
        held(parameter).fill(torch.full(parameter.ds_shape, value))
    with torch.no_grad():
        outputs.append(model(rows)[0, 0].item())
    way.settle(model)
print("outputs:", *outputs)
"""


@pytest.mark.nightly
def test_weights_are_filled_after_a_forward_pass_without_a_backward_one():
    """DeepSpeed then has weights on their way for the backward pass. Seen on two H200s: "Cannot partition a param in
    flight"."""
    alone = {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GATHERED_AHEAD],
        env={**os.environ, **alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected = []
    for value in (0.01, 0.02):
        output = 1.0
        for _ in range(6):
            output = 64 * value * output + value
        expected.append(output)
    assert [float(word) for word in done.stdout.split("outputs:")[1].split()] == pytest.approx(expected, rel=0.03)


OWN = """
    import pytest
    from torch import distributed, nn, randn
    from pytest_fp8 import Workload

    def batch(step):
        return randn(256, 64).chunk(distributed.get_world_size())[distributed.get_rank()]

    @pytest.fixture
    def fp8_workload():
        build = lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        return Workload(build, batch=batch, loss=lambda model, x: (model(x) - x.sin()).float().square().mean())

    @pytest.mark.fp8(emulated=True, gpus=2, parallel="zero3", compile=False)
    def test_own(fp8_pair):
        fp8_pair.assert_layers()
        fp8_pair.assert_numerics()
"""


@pytest.mark.nightly
def test_gradients_of_a_users_model_are_read_once_they_are_reduced(pytester):
    """DeepSpeed reduces its last ones after autograd's backward pass."""
    pytester.makepyfile(OWN)
    pytester.runpytest("--fp8-strict").assert_outcomes(passed=1)
