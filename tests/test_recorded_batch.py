"""An uncompiled step that is recorded needs no more memory than a compiled one: by few tokens, or by the host's."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from pytest_fp8 import Case  # noqa: E402
from pytest_fp8.arms.spec import ArmSpec  # noqa: E402
from pytest_fp8.worker.answers import numerics  # noqa: E402
from pytest_fp8.worker.record import room  # noqa: E402
from pytest_fp8.worker.server import ArmServer  # noqa: E402
from pytest_fp8.zoo.data import fingerprint  # noqa: E402
from pytest_fp8.zoo.shapes import SHAPES  # noqa: E402

pytestmark = pytest.mark.slow


def sizes(batch):
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


def test_a_large_batch_of_the_suites_models_is_recorded_in_part_and_trained_whole(monkeypatch):
    """Every product is judged on the beginning of the batch, and gradients on all of it."""
    monkeypatch.setattr(room, "TOKENS", 48)
    case = Case("micro", "torchao", "tensorwise", emulated=True)
    engine = ArmServer(ArmSpec(case, "cpu", None, threads=1)).engine
    whole, cut = engine.training_batch(0, 3), room.recorded_batch(engine, 0, 3)
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
    assert room.is_cut(SimpleNamespace(case=case)) is cut


def test_a_role_is_told_by_sizes_in_every_model_of_the_suite():
    """And a block of 128 scaled values is whole."""
    features = {size for s in SHAPES.values() for size in (s.hidden, s.intermediate, s.vocab)}
    features |= {
        heads * (s.head_dim or s.hidden // s.heads) for s in SHAPES.values() for heads in (s.heads, s.kv_heads)
    }
    assert room.TOKENS not in features
    assert room.TOKENS % 128 == 0


class Wrapped(torch.Tensor):
    """A library's own kind of tensor."""


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is not torch.ops.aten.detach.default:  # a view, which is no work
            self.operators.append(str(operator))
        return operator(*args, **(kwargs or {}))


def test_activations_on_the_host_change_no_gradient_and_are_not_seen(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    given, saved = torch.randn(4, 8), []
    # On a CPU nothing would be copied.
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: saved.append(type(tensor)) or tensor.clone())

    def gradients():
        factor = torch.ones(8).as_subclass(Wrapped).requires_grad_()
        with Seen() as seen:
            loss = (model(given) * factor).sum()
            return torch.autograd.grad(loss, list(model.parameters())), seen.operators

    plain, operators = gradients()
    assert not saved
    with room.saved_on_host():
        again, watched = gradients()
    assert all(map(torch.equal, plain, again))
    assert watched == operators
    assert saved
    assert Wrapped not in saved


@pytest.mark.parametrize(("free", "own", "compiled", "kept"), [
    (50, True, True, True), (70, True, True, False), (50, False, True, False), (50, True, False, False)
])  # fmt: skip
def test_only_a_users_compiled_step_may_need_more_than_is_free(monkeypatch, free, own, compiled, kept):
    gib, asked = 2**30, []
    memory = {"max_memory_allocated": 54, "memory_allocated": 24, "memory_reserved": 26}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((free - 2) * gib, 80 * gib))
    for name, size in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda size=size: size * gib)
    on_host = room.saved_on_host
    monkeypatch.setattr(room, "saved_on_host", lambda: asked.append(True) or on_host())
    setup = SimpleNamespace(own=object() if own else None)
    with room.uncompiled(SimpleNamespace(setup=setup, compiled=compiled, device=torch.device("cuda"))):
        pass
    assert bool(asked) is kept
