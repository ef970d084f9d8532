"""What ``next`` of a message advises is tried once: the mistake is refused with it, and what it says to do is not."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.evidence import CASE as LAYERS_CASE
from helpers.evidence import SIZES, layers_evidence
from pytest_fp8 import Case, Workload, gpu
from pytest_fp8.codes import L, R
from pytest_fp8.codes.pages import named
from pytest_fp8.errors import Fp8Error, refuse_unknown
from pytest_fp8.markers import cases_of
from pytest_fp8.options import Settings
from pytest_fp8.questions.layers.check import check_layers, strictly
from pytest_fp8.recipes import ROLES, Reason, Stays
from pytest_fp8.verdicts import Verdict


def mark(*marks, **fields):
    """What pytest makes of a test with these marks."""
    found = marks or (pytest.mark.fp8(**fields),)
    return lambda: cases_of("test_x.py::test", [(None, each.mark) for each in found], Settings())


def case(**fields):
    return lambda: Case(**{"model": "tiny", "backend": "torchao", "recipe": "tensorwise", **fields})


def workload(**fields):
    return lambda: Workload(**{"build": lambda: None, "batch": lambda step: None, **fields})


def shipped(**fields):
    return lambda: workload(**fields)().ship("test_x.py::test")


class Model:
    def named_parameters(self): ...

    def __call__(self): ...


def numbers():
    while True:
        yield 1.0


LOCK, NUMBERS, MADE = threading.Lock(), numbers(), [1.0, 2.0]
TENSORWISE, ROWWISE = (pytest.mark.fp8(recipe=recipe) for recipe in ("tensorwise", "rowwise"))
SETTINGS = {
    # Mistake, a part of what next says, and what it says to write.
    "te, emulated": (mark(backend="te", emulated=True), "backend='torchao'", mark(emulated=True)),
    "te, emulated, on a GPU": (
        mark(backend="te", emulated=True),
        "without emulated=True, on a GPU: backend='te', recipe='delayed'",
        mark(backend="te", recipe="delayed"),
    ),
    "te without a recipe": (mark(backend="te"), "recipe='delayed'", mark(backend="te", recipe="delayed")),
    "another library's recipe": (
        mark(recipe="delayed"),
        "backend='transformer_engine', which has 'delayed'",
        mark(backend="transformer_engine", recipe="delayed"),
    ),
    "this library's recipe": (mark(recipe="delayed"), "recipe='tensorwise'", mark(recipe="tensorwise")),
    "misspelt recipe": (mark(recipe="tensorwize"), "did you mean 'tensorwise'?", mark(recipe="tensorwise")),
    "recipes as a text": (
        mark(recipe="tensorwise,rowwise"),
        "recipe=['tensorwise', 'rowwise']",
        mark(recipe=["tensorwise", "rowwise"]),
    ),
    "backends as a text": (
        mark(backend="torchao, accelerate.torchao"),
        "backend=['torchao', 'accelerate.torchao']",
        mark(backend=["torchao", "accelerate.torchao"]),
    ),
    "capital letters": (case(model="1B"), "did you mean '1b'?", case(model="1b")),
    "a backend's capitals": (mark(backend="TorchAO"), "did you mean 'torchao'?", mark(backend="torchao")),
    "no backend": (mark(backend="cuda"), "backend='torchao'", mark(backend="torchao")),
    "option": (
        mark(backend="te", recipe="delayed", options={"margn": 1}),
        "did you mean 'margin'?",
        mark(backend="te", recipe="delayed", options={"margin": 1}),
    ),
    "chip": (case(chip="hoper"), "did you mean 'hopper'?", case(chip="hopper")),
    "question": (case(questions=("layer",)), "did you mean 'layers'?", case(questions=("layers",))),
    "argument": (mark(recipy="rowwise"), "did you mean 'recipe'?", mark(recipe="rowwise")),
    "GPUs alone": (mark(gpus=2), "parallel='fsdp2' beside gpus=2", mark(gpus=2, parallel="fsdp2")),
    "zero3 compiled": (mark(gpus=2, parallel="zero3"), "parallel='fsdp2'", mark(gpus=2, parallel="fsdp2")),
    "rows of an own model": (case(model="own", batch=4), "leave them out", case(model="own")),
    "an old name": (mark(loss_steps=40), "steps=40", mark(steps=40)),
    "a field of a case": (
        mark(model="tiny"),
        "cases=[pytest_fp8.Case('tiny', 'torchao', 'tensorwise')]",
        mark(cases=[Case("tiny", "torchao", "tensorwise")]),
    ),
    "adapters": (
        case(backend="unsloth", recipe="rowwise"),
        "lora=16",
        case(backend="unsloth", recipe="rowwise", lora=16),
    ),
    "truth as a text": (mark(emulated="true"), "emulated=True", mark(emulated=True)),
    "number as a text": (mark(steps="40"), "steps=1", mark(steps=1)),
    "positional": (mark(pytest.mark.fp8("torchao")), "fp8(backend='torchao')", mark(backend="torchao")),
    "two marks": (
        mark(TENSORWISE, ROWWISE),
        "recipe=['tensorwise', 'rowwise']",
        mark(recipe=["tensorwise", "rowwise"]),
    ),
    "no list of cases": (
        mark(cases=7),
        "cases=[Case('own', 'torchao', 'tensorwise')]",
        mark(cases=[Case("own", "torchao", "tensorwise")]),
    ),
    "an empty list": (mark(recipe=[]), "put a value into the list", mark(recipe=["rowwise"])),
    "a value twice": (mark(recipe=["rowwise", "rowwise"]), "take one of the two out", mark(recipe=["rowwise"])),
    "no case that answers": (
        mark(emulated=True, question="memory"),
        "another question=",
        mark(emulated=True, question="layers"),
    ),
    "A100": (lambda: gpu.known("a100"), "leave --fp8-gpu out", mark(emulated=True)),
    "a longer name": (lambda: gpu.known("H100-SXM5"), "did you mean --fp8-gpu=h100?", lambda: gpu.known("h100")),
    "a misspelt chip": (lambda: gpu.known("hoper"), "did you mean --fp8-gpu=hopper?", lambda: gpu.known("hopper")),
    "a GPU without a name here": (lambda: gpu.known("l4"), "ada fit any GPU of theirs", lambda: gpu.known("ada")),
    "a code": (lambda: named("FP8-L1"), "did you mean 'FP8-L", lambda: named("FP8-L01")),
    "model=": (workload(model=Model), "did you mean build=?", workload(build=Model)),
    "data=": (workload(data=len), "did you mean batch=?", workload(batch=lambda step: 1)),
    "loss_fn=": (workload(loss_fn=len), "did you mean 'loss'?", workload(loss=lambda model, batch: 1)),
    "a model": (workload(build=Model()), "build=lambda: ...", workload(build=Model)),
    "no step": (workload(batch=lambda: 1), "def batch(step): ...", workload(batch=lambda step: 1)),
    "swapped": (
        workload(loss=lambda x, model: 1),
        "def loss(model, batch): ...",
        workload(loss=lambda model, batch: 1),
    ),
    "leave as a text": (workload(leave="*.router"), "leave=('*.router',)", workload(leave=("*.router",))),
    "rate as a text": (workload(learning_rate="1e-3"), "learning_rate=1e-3", workload(learning_rate=1e-3)),
    "save alone": (
        shipped(save=lambda model, optimizer, folder: 1),
        "give both",
        shipped(save=lambda model, optimizer, folder: 1, load=lambda model, optimizer, folder: 1),
    ),
    "an iterator": (
        shipped(batch=lambda step: next(NUMBERS)),
        "batches[step % len(batches)]",
        shipped(batch=lambda step: MADE[step % len(MADE)]),
    ),
    "a lock": (
        shipped(batch=lambda step: LOCK.locked()),
        "create it inside the function",
        shipped(batch=lambda step: threading.Lock().locked()),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_advised_of_settings_is_taken(name):
    mistake, advised, mended = SETTINGS[name]
    with pytest.raises(Fp8Error) as error:
        mistake()
    assert advised in error.value.next_step
    mended()


@pytest.mark.parametrize("name", ["gh200 480gb", "NVIDIA_H200_NVL", "b200-sxm", "rtx 6000 ada", "l40s-48q"])
def test_a_gpu_is_known_by_the_name_that_a_cluster_has_for_it(name):
    with pytest.raises(Fp8Error, match=r"did you mean --fp8-gpu=(\w+)\?") as error:
        gpu.known(name)
    assert gpu.known(re.search(r"--fp8-gpu=(\w+)\?", error.value.next_step)[1]) in name.lower()


@pytest.mark.parametrize("name", ["V100", "a100-80gb", "A10G", "t4", "rtx 3090", "p100"])
def test_a_gpu_without_fp8_is_told_from_one_that_is_not_known(name):
    with pytest.raises(Fp8Error, match="this GPU has no FP8"):
        gpu.known(name)


@pytest.mark.parametrize("name", ["h1000", "mi300x", "l4", "rtx 5090", "a", ""])
def test_a_gpu_is_never_guessed_from_another_number(name):
    with pytest.raises(Fp8Error, match="no GPU of that name is known") as error:
        gpu.known(name)
    assert "did you mean" not in error.value.next_step


@pytest.mark.parametrize(
    "given",
    [
        {"loss": lambda net, rows: 1},
        {"loss": lambda batch_model, model_batch: 1},
        {"loss": lambda model, x, scale=2: 1},
        {"loss": lambda *given: 1},
        {"step": lambda net, rows, opt, ctx: 1},
    ],
)
def test_names_of_ones_own_are_no_swapped_arguments(given):
    workload(**given)()


def test_a_list_is_advised_only_where_each_of_its_names_is_known():
    with pytest.raises(Fp8Error) as error:
        refuse_unknown(R.UNKNOWN_NAME, "x", "rowwise, x", ["rowwise", "tensorwise"], takes_list="recipe")
    assert "a list" not in error.value.next_step


def test_a_pattern_that_matches_nothing_fails_where_strict_and_is_a_note_elsewhere():
    evidence = layers_evidence(unmatched=["mlp.*"])
    decision = check_layers(LAYERS_CASE, evidence)
    assert decision.verdict is Verdict.PASS
    assert "leave='mlp.*' matches no Linear" in decision.numbers["notes"]
    strict = strictly(decision, evidence)
    assert (strict.verdict, strict.code) == (Verdict.FAIL, L.LEAVES_NOTHING)
    assert strict.numbers["notes"] == [each for each in decision.numbers["notes"] if "leave=" not in each]
    assert "take it out of Workload(leave=...)" in strict.next_step
    without = layers_evidence()
    assert strictly(check_layers(LAYERS_CASE, without), without).verdict is Verdict.PASS


def test_sizes_that_no_kernel_takes_are_the_first_cause():
    odd = Reason(Stays.SIZE, "in_features=30 is not a multiple of 16")
    nothing = layers_evidence(bf16=[(name, role) for name in ("q", "up") for role in ROLES])
    calls = [replace(call, fp8=False) for call in nothing.calls]
    nothing = replace(nothing, calls=calls, converted=[], live_fp8=[], skipped=dict.fromkeys(SIZES, odd))
    decision = check_layers(LAYERS_CASE, nothing)
    assert decision.cause.startswith("no Linear that could be FP8 has sizes that it takes")
    assert "make in_features and out_features multiples of 16" in decision.next_step
    assert check_layers(LAYERS_CASE, layers_evidence()).verdict is Verdict.PASS


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


def flagged(set_it):
    def build_it():
        if set_it:
            os.environ["A_FLAG_OF_MINE"] = "1"
        assert os.environ["A_FLAG_OF_MINE"]
        return build()

    return build_it


def with_step(*, backward=True, steps=True):
    def step(model, rows, optimizer, precision):
        optimizer.zero_grad()
        with precision():
            found = loss(model, rows)
        if backward:
            found.backward()
        if steps:
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


def spectrum(cast):
    def loss_of(model, rows):
        import torch

        found = model(rows)
        return torch.fft.rfft(found.float() if cast else found).abs().mean()

    return loss_of


def classes(as_integers):
    def loss_of(model, rows):
        import torch

        target = torch.arange(16) if as_integers else torch.arange(16).bfloat16()
        return torch.nn.functional.cross_entropy(model(rows).float(), target)

    return loss_of


def lazy(called):
    def build_it():
        import torch

        model = torch.nn.Sequential(torch.nn.LazyLinear(32))
        if called:
            model(torch.ones(2, 32))
        return model

    return build_it


def contexts(sound):
    def precision():
        import contextlib

        return contextlib.nullcontext() if sound else None

    return precision


def loader():
    import torch

    return torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=16)


ALL = [1.0, 2.0, 3.0]
IN_AN_ARM = {
    "a relative path": (
        {"batch": in_file("no_such_file.txt")},
        "Path(__file__).parent / 'no_such_file.txt'",
        {"batch": in_file(Path(__file__).parent / "conftest.py")},
    ),
    "no module": ({"batch": importing}, "-m pip install a_module_of_nobody", {"batch": importing}),
    "a variable": ({"build": flagged(False)}, "os.environ['A_FLAG_OF_MINE'] = ...", {"build": flagged(True)}),
    "the batch first": ({"loss": lambda x, net: net(x).mean()}, "def loss(model, batch)", {"loss": loss}),
    "no model": ({"build": built(lambda model: None)}, "return the model", {"build": build}),
    "lazy": ({"build": lazy(False)}, "call the model once in build()", {"build": lazy(True)}),
    "frozen": ({"build": built(lambda model: model.requires_grad_(False))}, "leave what is to be trained", {}),
    "a generator": ({"batch": lambda step: iter([1])}, "batches[step % len(batches)]", {}),
    "a loader": (
        {"batch": lambda step: loader()},
        "batches[step % len(batches)]",
        {"batch": lambda step: list(loader())[step % 4]},
    ),
    "at its end": (
        {"batch": lambda step: next(iter(()))},
        "batches[step % len(batches)]",
        {"batch": lambda step: batch(step) * ALL[step % len(ALL)]},
    ),
    "a number": ({"loss": lambda model, x: loss(model, x).item()}, "without .item()", {"loss": loss}),
    "a dict": (
        {"loss": lambda model, x: {"loss": loss(model, x)}},
        "result['loss'] in place of result",
        {"loss": lambda model, x: {"loss": loss(model, x)}["loss"]},
    ),
    "no backward": ({"step": with_step(backward=False)}, "call loss.backward()", {"step": with_step()}),
    "no step": ({"step": with_step(steps=False)}, "call optimizer.step()", {"step": with_step()}),
    "the schedule": (
        {"optimizer": with_optimizer(lambda optimizer: scheduled(optimizer, alone=True))},
        "optimizer.scheduler = schedule",
        {"optimizer": with_optimizer(lambda optimizer: scheduled(optimizer, alone=False))},
    ),
    "no optimizer": (
        {"optimizer": with_optimizer(lambda optimizer: [optimizer])},
        "use one optimizer",
        {"optimizer": with_optimizer(lambda optimizer: optimizer)},
    ),
    "another type": (
        {"build": adding(lambda x: __import__("torch").float32)},
        "make it in the input's dtype",
        {"build": adding(lambda x: x.dtype)},
    ),
    "no such operator": ({"loss": spectrum(cast=False)}, "torch.fft.rfft(x.float())", {"loss": spectrum(cast=True)}),
    "classes": (
        {"loss": classes(as_integers=False)},
        "give class targets as integers",
        {"loss": classes(as_integers=True)},
    ),
    "conversion": ({"convert": lambda model: 7}, "return the converted model", {"convert": lambda model: model}),
    "context": ({"precision": contexts(False)}, "what a with statement takes", {"precision": contexts(True)}),
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

    mistake, advised, mended = IN_AN_ARM[name]
    monkeypatch.delenv("A_FLAG_OF_MINE", raising=False)
    with pytest.raises(BaseException) as error:  # noqa: PT011
        served(mistake)
    told = _describe(error.value)
    assert advised in told["next"], told
    (tmp_path / "a_module_of_nobody.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("A_FLAG_OF_MINE", "")
    monkeypatch.delenv("A_FLAG_OF_MINE")
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
    """Under -q, where the header that names the baselines is hidden."""
    pytest.importorskip("torchao")
    pytester.makepyfile(SESSION)
    said = pytester.runpytest("-q", "--fp8-baselines=nowhere").outlines
    assert len([line for line in said if "in the arm 'own-bf16-emulated on cpu'" in line]) == 1
    assert "next:     name the file from the folder of the test file: Path(__file__).parent / 'weights.pt'" in "".join(
        said
    )
    assert "[1] FP8-R04: see above" in said
    assert any(line.startswith("what a code means: pytest-fp8 explain FP8-R04; documentation: ") for line in said)
    note = f"FP8-R46: --fp8-baselines names {pytester.path}/nowhere, and there is no such folder"
    assert any(line.startswith(note) for line in said)


def test_the_address_of_the_docs_stands_in_one_place(monkeypatch):
    import tomllib
    from email.message import Message

    from pytest_fp8 import libraries

    root = Path(__file__).parent.parent
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    package = Message()
    for name, url in urls.items():
        package["Project-URL"] = f"{name}, {url}"
    monkeypatch.setattr(libraries, "metadata", lambda name: package)
    assert libraries.documentation("options.md") == urls["Documentation"].replace("index.md", "options.md")
    assert libraries.documentation() == urls["Documentation"]
    monkeypatch.setattr(libraries, "metadata", lambda name: Message())
    assert libraries.documentation("options.md") == "docs/options.md"
    code = [path for path in (root / "pytest_fp8").rglob("*") if path.suffix in (".py", ".toml")]
    assert [path.name for path in code if urls["Documentation"] in path.read_text()] == []
