"""FP8 training by train.py. The test calls the script's own functions, so what breaks there fails here."""

import pytest
import train

from pytest_fp8 import Workload

SMALL = ["--layers=2", "--width=64", "--heads=2", "--rows=8", "--length=64", "--rate=1e-3"]


@pytest.fixture
def fp8_workload(fp8_case):
    given = train.options(SMALL if fp8_case.emulated else [])
    return Workload(
        build=lambda: train.make_model(given),
        batch=lambda step: train.make_batch(given),
        step=lambda model, batch, optimizer, precision: train.train_step(model, batch, optimizer),
        optimizer=lambda parameters: train.make_optimizer(parameters, given),
        convert=train.to_fp8,
    )


@pytest.mark.fp8(emulated=True, name="small")
def test_without_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
    fp8_pair.assert_checkpoints()


ON_A_GPU = pytest.mark.fp8(name="train", steps=20)


@ON_A_GPU
def test_on_a_gpu(fp8_pair):
    fp8_pair.assert_faster()
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
    fp8_pair.assert_checkpoints()


@ON_A_GPU
def test_no_slower_and_no_larger_than_before(fp8_pair):
    fp8_pair.assert_layers()  # a baseline is stored where FP8 was seen to run
    fp8_pair.assert_speedup()
    fp8_pair.assert_memory()
