"""Activations that wait in the host's memory: the gradients are the same, and only the watched step pays."""

import pytest

torch = pytest.importorskip("torch")

from helpers.arms import spec  # noqa: E402
from pytest_fp8 import Case  # noqa: E402
from pytest_fp8.backends import backend as backend_of  # noqa: E402
from pytest_fp8.worker.answers import ledger  # noqa: E402
from pytest_fp8.worker.server import ArmServer  # noqa: E402
from pytest_fp8.worker.state import host_copies  # noqa: E402
from pytest_fp8.worker.training import ranks  # noqa: E402
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
    copied: list[int] = []
    staged = activations.staged
    monkeypatch.setattr(activations, "staged", lambda t, stage: copied.append(t.numel()) or staged(t, stage))
    with activations.kept_on_host("cpu"):
        assert gradient().equal(plain)
    assert bool(copied) is (laid_out != "columns"), "what is contiguous goes through the buffer"
    strides = views[laid_out](weight).stride()
    assert Keeps.seen[0] == strides
    if laid_out != "every second":
        assert Keeps.seen[1] == strides


def test_small_ones_and_those_of_another_device_stay(monkeypatch):
    monkeypatch.setattr(activations, "staged", lambda *_: pytest.fail("copied"))
    x = torch.randn(1 << 20, requires_grad=True)
    with activations.kept_on_host():
        (x * x).sum().backward()
    with activations.kept_on_host("cpu"):
        (x[:8] * x[:8]).sum().backward()


def test_only_the_watched_step_keeps_its_activations_there(monkeypatch):
    server = ArmServer(spec(Case("tiny", "torchao", "rowwise", emulated=True)))
    asked: list[str] = []
    kept_on_host = activations.kept_on_host
    monkeypatch.setattr(ledger, "kept_on_host", lambda: asked.append("begun") or kept_on_host("cpu"))
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
