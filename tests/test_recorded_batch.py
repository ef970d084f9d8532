"""Large batches of the suite's models are recorded in part."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from pytest_fp8 import Case
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.worker.answers import numerics, recorded
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.zoo.data import fingerprint
from pytest_fp8.zoo.shapes import SHAPES

pytestmark = pytest.mark.slow


def sizes(batch):
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


def test_a_large_batch_of_the_suites_models_is_recorded_in_part_and_trained_whole(monkeypatch):
    """Every product is judged on the beginning of the batch, and gradients on all of it."""
    monkeypatch.setattr(recorded, "TOKENS", 48)
    case = Case("micro", "torchao", "tensorwise", emulated=True)
    engine = ArmServer(ArmSpec(case, "cpu", None, threads=1)).engine
    whole, cut = engine.training_batch(0, 3), recorded.recorded_batch(engine, 0, 3)
    assert (sizes(whole)["input_ids"], sizes(cut)["input_ids"]) == ((4, 24), (1, 48))
    assert all(cut[name].flatten().equal(whole[name].flatten()[:48]) for name in whole)

    rows = []
    engine.model.lm_head.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1].numel()))
    monkeypatch.setattr(numerics, "LATER", 1)
    found = numerics.numerics(engine, moved=False)
    assert {48: rows.count(48), 96: rows.count(96)} == {48: 2, 96: 4}, (
        "in part: the recorded step and a later one; whole: gradients, evaluations, training"
    )
    assert {(each["layer"], each["role"]) for each in found["products"]} == {
        (name, role) for name in engine.conversion.converted for role in ("fprop", "dgrad", "wgrad")
    }
    assert found["gradients"]["data"] == fingerprint(engine.training_batch(0, 0))


@pytest.mark.parametrize(
    ("case", "cut"),
    [
        (Case("8b", "torchao", "tensorwise"), True),
        (Case("micro", "torchao", "tensorwise", emulated=True), False),
        (Case("1b", "torchao", "tensorwise", batch=2, seq=1024, gpus=2, parallel="fsdp2"), False),
        (Case("own", "torchao", "tensorwise"), False),
    ],
    ids=lambda each: each.id if isinstance(each, Case) else "",
)
def test_small_batches_and_those_of_users_are_recorded_whole(case, cut):
    assert recorded.is_cut(SimpleNamespace(case=case)) is cut


def test_a_role_is_told_by_sizes_in_every_model_of_the_suite():
    """And a block of 128 scaled values is whole."""
    features = {size for s in SHAPES.values() for size in (s.hidden, s.intermediate, s.vocab)}
    features |= {
        heads * (s.head_dim or s.hidden // s.heads) for s in SHAPES.values() for heads in (s.heads, s.kv_heads)
    }
    assert recorded.TOKENS not in features
    assert recorded.TOKENS % 128 == 0
