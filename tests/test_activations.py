"""Activations that wait in the host's memory: the gradients are the same, and only the watched step pays."""

import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from helpers.arms import spec  # noqa: E402
from pytest_fp8 import Case  # noqa: E402
from pytest_fp8.backends import backend as backend_of  # noqa: E402
from pytest_fp8.worker.answers import ledger  # noqa: E402
from pytest_fp8.worker.server import ArmServer  # noqa: E402
from pytest_fp8.worker.training import host_copies, ranks  # noqa: E402
from pytest_fp8.worker.watch import activations  # noqa: E402

pytestmark = pytest.mark.slow


class Keeps(torch.autograd.Function):
    """Keeps its input as it is laid out, and looks at it on the way back."""

    seen: list[tuple[int, ...]]

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        [x] = context.saved_tensors
        Keeps.seen.append(x.stride())
        return 2 * x * gradient


def copies(monkeypatch):
    """The bytes of each tensor that is copied to the host from here on."""
    copied: list[int] = []
    real = activations.staged

    def staged(tensor, stage, device=None):
        if device is not None:
            return real(tensor, stage, device)
        copied.append(tensor.numel())
        return real(tensor, stage)

    monkeypatch.setattr(activations, "staged", staged)
    monkeypatch.setattr(activations, "LEAST_VALUES", 16)
    return copied


def gradients(model, x):
    """Of the weights and of the input."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])


class Heads(torch.nn.Module):
    """Three layers that take one input, one of which takes a part of it."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(width, 24, bias=False) for width in (16, 16, 8))

    def forward(self, x):
        x = x.relu()
        return self.q(x) + self.k(x) * self.v(x[..., :8])


def test_each_is_copied_once_and_weights_are_not(monkeypatch):
    model, x = Heads(), torch.randn(2, 4, 16)
    plain, copied = gradients(model, x), copies(monkeypatch)
    with activations.kept_on_host(device="cpu"):
        again = gradients(model, x)
    assert all(map(torch.equal, plain, again))
    # relu's output, which two layers take, and a third a part of it; the two factors; their sum.
    assert sorted(copied) == [4 * 2 * 4 * 16, *[4 * 2 * 4 * 24] * 3]


@pytest.mark.parametrize(("room", "number"), [(0, 4), (511, 4), (512, 3), (512 + 768, 2), (10**6, 0)])
def test_the_first_ones_stay_where_there_is_room(monkeypatch, room, number):
    """What relu gives takes 512 bytes, and a part of it none besides."""
    model, x = Heads(), torch.randn(2, 4, 16)
    plain, copied = gradients(model, x), copies(monkeypatch)
    with activations.kept_on_host(room, "cpu"):
        assert all(map(torch.equal, plain, gradients(model, x)))
    assert len(copied) == number


def test_what_was_copied_is_given_up_once_autograd_needs_it_no_more(monkeypatch):
    """The steps of a user's own loop may have many micro-batches."""
    model, x, kept = Heads(), torch.randn(2, 4, 16), []
    copied, staged = copies(monkeypatch), activations.staged
    monkeypatch.setattr(
        activations, "staged", lambda *given: kept.append(weakref.ref(found := staged(*given))) or found
    )
    with activations.kept_on_host(device="cpu"):
        gradients(model, x)
        assert copied
        assert [refer() for refer in kept if refer() is not None] == []


def test_one_that_is_changed_in_place_or_freed_is_not_taken_for_another(monkeypatch):
    monkeypatch.setattr(activations, "LEAST_VALUES", 16)

    def gradient():
        weight, total = torch.ones(64, requires_grad=True), 0.0
        x = torch.linspace(0, 1, 64)
        for step in range(6):
            # The storage of the one before is free by now, and its address is likely used again.
            total = total + (weight * (x + step)).sum()
            x.add_(1)
            total = total + (weight * x).sum()
        return torch.autograd.grad(total, weight)[0]

    with activations.kept_on_host(device="cpu"):
        found = gradient()
    x, expected = torch.linspace(0, 1, 64), torch.zeros(64)
    for step in range(6):
        expected += (x + 2 * step) + (x + step + 1)
    assert found.allclose(expected)


@pytest.mark.parametrize(("gpus", "free", "room"), [(2, 50, 50 + 2 - 30 - 5), (2, 30, 0), (1, 50, 0)])
def test_the_room_is_what_is_free_beyond_a_compiled_step(monkeypatch, gpus, free, room):
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * gib, 80 * gib))
    for name, size in (("max_memory_allocated", 54), ("memory_allocated", 24), ("memory_reserved", 26)):
        monkeypatch.setattr(torch.cuda, name, lambda size=size: size * gib)
    case = Case("8b", "torchao", "tensorwise", batch=gpus, gpus=gpus, parallel="fsdp2" if gpus > 1 else "")
    assert ranks.room_for_activations(case) == room * gib


def test_what_nothing_goes_back_through_is_given_up(monkeypatch):
    """An operator keeps its output, which would keep the operator."""
    monkeypatch.setattr(activations, "LEAST_VALUES", 16)
    x = torch.randn(64, requires_grad=True)
    with activations.kept_on_host(10**6, "cpu"):
        output = x.softmax(0)
    alive = StorageWeakRef(output.untyped_storage())
    del output
    assert alive.expired()


@pytest.mark.parametrize("view", [lambda x: x[3], lambda x: x[:, 2:6:2], lambda x: x.t()[5]])
def test_a_small_part_of_a_large_storage_is_copied_alone(monkeypatch, view):
    base, copied = torch.randn(64, 32), copies(monkeypatch)
    weight = torch.ones(view(base).shape, requires_grad=True)
    with activations.kept_on_host(device="cpu"):
        [found] = torch.autograd.grad((weight * view(base)).sum(), weight)
    assert found.equal(view(base))
    assert copied == [view(base).nbytes // 4]


class Saves(torch.autograd.Function):
    """Keeps any tensor beside its input."""

    back: torch.Tensor

    @staticmethod
    def forward(context, x, kept):
        context.save_for_backward(kept)
        return x * 1

    @staticmethod
    def backward(context, gradient):
        [Saves.back] = context.saved_tensors
        return gradient, None


COMPLEX = torch.view_as_complex(torch.randn(8, 16, 2))


@pytest.mark.parametrize(
    "kept", [torch.eye(8).to_sparse(), COMPLEX.conj(), COMPLEX.conj().imag], ids=["sparse", "conjugate", "negative"]
)
def test_what_is_no_plain_block_of_numbers_stays(monkeypatch, kept):
    copied, x = copies(monkeypatch), torch.ones(4, requires_grad=True)
    with activations.kept_on_host(device="cpu"):
        Saves.apply(x, kept).sum().backward()
    assert copied == []
    dense = [each.to_dense() if each.is_sparse else each.resolve_conj() for each in (kept, Saves.back)]
    assert torch.equal(*dense)


@pytest.mark.parametrize("laid_out", ["rows", "columns", "every second"])
def test_gradients_and_strides_are_those_of_activations_that_stay(monkeypatch, laid_out):
    monkeypatch.setattr(activations, "LEAST_VALUES", 16)
    monkeypatch.setattr(host_copies, "STAGE_BYTES", 64)
    weight = torch.randn(8, 12, requires_grad=True)
    views = {"rows": lambda x: x, "columns": lambda x: x.t(), "every second": lambda x: x[:, ::2]}
    Keeps.seen = []

    def gradient():
        x = views[laid_out](weight * 1.5)
        [found] = torch.autograd.grad(Keeps.apply(x).relu().sum(), weight)
        return found

    plain = gradient()
    copied = copies(monkeypatch)
    with activations.kept_on_host(device="cpu"):
        assert gradient().equal(plain)
    assert copied
    assert Keeps.seen == [views[laid_out](weight).stride()] * 2


def test_small_ones_and_those_of_another_device_stay(monkeypatch):
    monkeypatch.setattr(activations, "staged", lambda *_: pytest.fail("copied"))
    x = torch.randn(1 << 20, requires_grad=True)
    with activations.kept_on_host():
        (x * x).sum().backward()
    with activations.kept_on_host(device="cpu"):
        (x[:8] * x[:8]).sum().backward()


def test_only_the_watched_step_keeps_its_activations_there(monkeypatch):
    server = ArmServer(spec(Case("tiny", "torchao", "rowwise", emulated=True)))
    asked: list[str] = []
    kept_on_host = activations.kept_on_host
    monkeypatch.setattr(ledger, "kept_on_host", lambda _: asked.append("begun") or kept_on_host(device="cpu"))
    monkeypatch.setattr(ledger, "uncompiled_step_fits", lambda *_: False)
    step = server.engine.step
    steps: list[int] = []
    monkeypatch.setattr(server.engine, "step", lambda *a, **k: steps.append(len(asked)) or step(*a, **k))
    loss = ledger.ledger_of(server.engine).loss
    assert steps[-1] == 1, "the watched step"
    assert not any(steps[:-1]), "those before it"
    monkeypatch.undo()
    assert loss == ledger.ledger_of(ArmServer(spec(Case("tiny", "torchao", "rowwise", emulated=True))).engine).loss


@pytest.mark.parametrize(
    ("backend", "recipe", "fits"), [("torchao", "tensorwise", False), ("transformer_engine", "delayed", True)]
)
def test_what_transformer_engine_takes_over_bf16_it_takes_compiled_or_not(monkeypatch, backend, recipe, fits):
    """As with half of 8B's layers on each of two GPUs: Transformer Engine's step takes 27 GiB, and 52 are free."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 39 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 12 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (52 * gib, 80 * gib))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    case = Case("8b16", backend, recipe, gpus=2, parallel="fsdp2", batch=4)
    times = backend_of(backend).uncompiled_over_compiled
    assert ranks.uncompiled_step_fits(case, torch.device("cuda"), times) is fits
