"""What ``next`` of a message advises is tried once: the mistake is refused with it, and what it says to do is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fp8 import Case, Workload

# -- in an arm ------------------------------------------------------------------------------------------------------


def build():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))


def batch(step):
    import torch

    return torch.randn(16, 32)


def loss(model, rows):
    return model(rows).float().square().mean()


def built(change=lambda model: model):
    """A build whose model is changed."""
    return lambda: change(build())


def in_file(name):
    def batch(step):
        import torch

        return torch.randn(16, 32 if Path(name).read_text() else 1)

    return batch


def importing(step):
    import a_module_of_nobody  # type: ignore[import-not-found]  # noqa: F401

    return batch(step)


def with_step(backward=True):
    def step(model, rows, optimizer, precision):
        optimizer.zero_grad()
        with precision():
            found = loss(model, rows)
        if backward:
            found.backward()
        optimizer.step()
        return found.detach()

    return step


def with_optimizer(make):
    def optimizer(parameters):
        import torch

        return make(torch.optim.SGD(parameters, lr=0.01))

    return optimizer


def scheduled(optimizer, alone):
    import torch

    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return optimizer.scheduler if alone else optimizer


def adding(dtype_of):
    def build_it():
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = build()

            def forward(self, x):
                positions = torch.arange(32, device=x.device).float()
                return self.inner(x + positions.to(dtype_of(x))) @ torch.ones(32, 32).to(dtype_of(x))

        return Net()

    return build_it


def classes(as_integers):
    def loss_of(model, rows):
        import torch

        target = torch.arange(16) if as_integers else torch.arange(16).bfloat16()
        return torch.nn.functional.cross_entropy(model(rows).float(), target)

    return loss_of


def loader():
    import torch

    return torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=16)


IN_AN_ARM = {
    "a relative path": (
        {"batch": in_file("no_such_file.txt")},
        "Path(__file__).parent / 'no_such_file.txt'",
        {"batch": in_file(Path(__file__).parent / "conftest.py")},
    ),
    "no module": ({"batch": importing}, "-m pip install a_module_of_nobody", {"batch": importing}),
    "the batch first": ({"loss": lambda x, net: net(x).mean()}, "def loss(model, batch)", {"loss": loss}),
    "a loader": (
        {"batch": lambda step: loader()},
        "batches[step % len(batches)]",
        {"batch": lambda step: list(loader())[step % 4]},
    ),
    "an iterator": (
        {"batch": lambda step: next(iter(()))},
        "batches[step % len(batches)]",
        {},
    ),
    "a device": ({"build": lambda: build().cuda()}, "leave the device out", {}),
    "a number": ({"loss": lambda model, x: loss(model, x).item()}, "without .item()", {"loss": loss}),
    "no backward": ({"step": with_step(backward=False)}, "call loss.backward()", {"step": with_step()}),
    "the schedule": (
        {"optimizer": with_optimizer(lambda optimizer: scheduled(optimizer, alone=True))},
        "a schedule as optimizer.scheduler",
        {"optimizer": with_optimizer(lambda optimizer: scheduled(optimizer, alone=False))},
    ),
    "another type": (
        {"build": adding(lambda x: __import__("torch").float32)},
        "make it in the input's dtype",
        {"build": adding(lambda x: x.dtype)},
    ),
    "classes": (
        {"loss": classes(as_integers=False)},
        "give class targets as integers",
        {"loss": classes(as_integers=True)},
    ),
    "conversion": ({"convert": lambda model: 7}, "return the converted model", {"convert": lambda model: model}),
}


def served(fields):
    """An arm in this process."""
    from pytest_fp8.arms.spec import ArmSpec
    from pytest_fp8.worker.server import ArmServer

    case = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True)
    shipped = Workload(**{"build": build, "batch": batch, "loss": loss, **fields}).ship("a test")
    own_fp8 = {"convert", "precision"} & fields.keys()
    return ArmServer(ArmSpec(case if own_fp8 else case.reference(), "cpu", shipped, threads=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_AN_ARM)
def test_what_is_advised_in_an_arm_mends_it(name, monkeypatch, tmp_path):
    pytest.importorskip("torchao")
    from pytest_fp8.worker.main import _describe

    if name == "a device" and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    mistake, advised, mended = IN_AN_ARM[name]
    with pytest.raises(BaseException) as error:  # noqa: PT011
        served(mistake)
    told = _describe(error.value)
    assert advised in told["next"], told
    (tmp_path / "a_module_of_nobody.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    served(mended)


@pytest.mark.slow
def test_a_full_disk_names_the_folder_and_what_a_checkpoint_needs(monkeypatch, tmp_path):
    pytest.importorskip("torchao")
    from pytest_fp8.worker.checkpoint import stores
    from pytest_fp8.worker.main import _describe

    def full(*given):
        raise OSError(28, "No space left on device")

    server = served({})
    with monkeypatch.context() as patched:
        patched.setattr(stores, "write", full)
        with pytest.raises(OSError, match="No space left") as error:
            server.save(f"{tmp_path}/fp8-ab12-x/one", "safetensors", True)
    told = _describe(error.value)
    assert re.search(
        rf"one checkpoint of this model takes 0.0 MB, and [\d.]+ MB are free in {tmp_path}$", told["cause"]
    )
    assert told["next"] == f"df -h {tmp_path}; make room there, or name another folder: TMPDIR=FOLDER pytest ..."
    server.save(str(tmp_path / "two"), "safetensors", True)


SESSION = """
import pytest
import torch
from pytest_fp8 import Workload


@pytest.fixture
def fp8_workload():
    return Workload(lambda: torch.load("weights.pt"), lambda step: torch.randn(16, 32))


@pytest.mark.fp8(emulated=True)
def test_mine(fp8_pair):
    fp8_pair.assert_layers()
"""


@pytest.mark.slow
def test_an_arms_error_is_printed_once_with_the_way_to_its_page(pytester):
    pytest.importorskip("torchao")
    pytester.makepyfile(SESSION)
    said = pytester.runpytest("-q").outlines
    assert len([line for line in said if "in the arm 'own-bf16-emulated on cpu'" in line]) == 1
    assert "next:     name the file from the folder of the test file: Path(__file__).parent / 'weights.pt'" in "".join(
        said
    )
    assert "[1] FP8-R04: see above" in said
    assert any(line.startswith("what a code means: pytest-fp8 explain FP8-R04; documentation: ") for line in said)
