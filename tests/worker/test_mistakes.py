"""Mistakes of users in live arms: each is refused with its cause, and what ``next`` advises is tried once."""

from __future__ import annotations

import dataclasses
import operator
import re
from pathlib import Path

import pytest

pytest.importorskip("torchao")

import torch
from torch import nn

from helpers.nets import CASE, build, by_torchao, lbfgs, loop, net, serve, squares
from pytest_fp8.codes import R
from pytest_fp8.worker import error_trace
from pytest_fp8.worker.checkpoint import stores
from pytest_fp8.worker.error_trace import known_cause, telling_line, trace_of
from pytest_fp8.worker.main import _describe
from pytest_fp8.worker.record.gradients import norm_of_all
from pytest_fp8.worker.token_count import TokenCountError

pytestmark = pytest.mark.slow


def rows(number, later=None):
    """A batch of so many rows; ``later``: from step 3 on."""
    return lambda step: torch.randn(number if later is None or step < 3 else later, 32)


# -- what a workload's functions give ---------------------------------------------------------------------------------


def in_file(name):
    return lambda step: torch.randn(16, 32 if Path(name).read_text() else 1)


def importing(step):
    import a_module_of_nobody  # type: ignore[import-not-found]  # noqa: F401

    return torch.randn(96, 32)


def loader(step):
    return torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=16)


def without_backward(model, batch, optimizer, precision):
    optimizer.step()
    return squares(model, batch).detach()


def without_the_optimizer(model, batch, optimizer, precision):
    loss = squares(model, batch)
    loss.backward()
    return loss


def without_a_loss(model, batch, optimizer, precision):
    loop()(model, batch, optimizer, precision)


def scheduled(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return optimizer


def schedule(parameters):
    return scheduled(parameters).scheduler


def two(parameters):
    half = list(parameters)
    return [torch.optim.AdamW(half[:2]), torch.optim.SGD(half[2:])]


def two_outputs():
    return net(lambda model, x: 2 * (model.only(x),), only=(32, 32))


def adding(dtype_of):
    """Adds positions of this type."""
    return lambda: net(lambda model, x: model.inner(x + torch.arange(32).float().to(dtype_of(x))), inner=build())


def classes(kind):
    return lambda model, x: nn.functional.cross_entropy(model(x).float(), torch.arange(len(x)).remainder(32).to(kind))


def normed():
    model = build()
    nn.utils.parametrizations.weight_norm(model.enter)
    return model


ONE_MODEL = nn.Linear(32, 32)
IN_FLOAT32, IN_ITS_DTYPE = adding(lambda x: torch.float32), adding(lambda x: x.dtype)
AS_FLOATS, AS_INTEGERS = classes(torch.bfloat16), classes(torch.long)
REFUSED = {
    # name: (parts of the workload, its code, what is advised, parts that take the advice)
    "a relative path": ({"batch": in_file("no_file.txt")}, R.ARM_RAISED, "Path(__file__).parent / 'no_file.txt'", {}),
    "no module": ({"batch": importing}, R.ARM_RAISED, "-m pip install a_module_of_nobody", {"batch": importing}),
    "the batch first": ({"loss": lambda x, net: net(x).mean()}, R.ARM_RAISED, "def loss(model, batch)", {}),
    "a loader": (
        {"batch": loader},
        R.BAD_BATCH,
        "batches[step % len(batches)]",
        {"batch": lambda s: [*loader(s)][s % 4]},
    ),
    "a device": ({"build": lambda: build().cuda()}, R.CUDA_IN_EMULATED_ARM, "leave the device out", {}),
    "a number": ({"loss": lambda model, x: squares(model, x).item()}, R.NO_LOSS, "without .item()", {}),
    "no loss": ({"loss": lambda model, x: None}, R.NO_LOSS, "without .item()", {}),
    "a loss of each row": ({"loss": lambda model, x: model(x).mean(1)}, R.NO_LOSS, "without .item()", {}),
    "a detached loss": ({"loss": lambda model, x: squares(model, x).detach()}, R.NO_LOSS, ".item()", {}),
    "a tuple": ({"build": two_outputs, "loss": None}, R.NO_LOSS, "Workload(loss=", {}),
    "no backward": ({"step": without_backward}, R.STEP_INCOMPLETE, "call loss.backward()", {"step": loop()}),
    "no optimizer": ({"step": without_the_optimizer}, R.STEP_INCOMPLETE, "", {}),
    "a step without a loss": ({"step": without_a_loss}, R.NO_LOSS, "", {}),
    "the schedule alone": (
        {"optimizer": schedule},
        R.BAD_OPTIMIZER,
        "as optimizer.scheduler",
        {"optimizer": scheduled},
    ),
    "two optimizers": ({"optimizer": two}, R.BAD_OPTIMIZER, "parameter groups", {}),
    "another type": ({"build": IN_FLOAT32}, R.MIXED_TYPES, "make it in the input's dtype", {"build": IN_ITS_DTYPE}),
    "classes": ({"loss": AS_FLOATS}, R.CLASSES_AS_FLOATS, "class targets as integers", {"loss": AS_INTEGERS}),
    "no conversion": ({"convert": lambda _: 7}, R.BAD_CONVERT, "return the converted model", {"convert": lambda m: m}),
    "converted by build()": ({"build": lambda: by_torchao()(build())}, R.BUILT_IN_FP8, "Workload(convert=...)", {}),
    "a computed weight": ({"build": normed, "case": CASE}, R.COMPUTED_WEIGHT, "leave=", {"leave": ("enter",)}),
    "one model for all": ({"build": lambda: ONE_MODEL}, R.MODEL_NOT_FRESH, "copy.deepcopy", {"build": build}),
}


def served(parts):
    """An arm in this process; the reference's where the mistake is none of the conversion."""
    case = CASE if {"convert", "case"} & parts.keys() else CASE.reference()
    server = serve(**{"case": case, **parts})
    server.restart(1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_advised_mends_it(name, monkeypatch, tmp_path):
    mistake, code, advised, mended = REFUSED[name]
    if name == "a device" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    told = _describe(raised(lambda: served(mistake)))
    assert told["code"] is code
    assert advised in told["next"], told
    if mended:
        (tmp_path / "a_module_of_nobody.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        served({**mistake, **mended})


def test_a_full_disk_names_the_folder_and_what_a_checkpoint_needs(monkeypatch, tmp_path):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stores, "write", full)
    told = _describe(raised(lambda: serve().save(f"{tmp_path}/fp8-ab12-x/one", "safetensors", True)))
    assert re.search(rf"checkpoint of this model takes 0.1 MB, and [\d.]+ MB are free in {tmp_path}$", told["cause"])
    assert told["next"] == f"df -h {tmp_path}; make room there, or name another folder: TMPDIR=FOLDER pytest ..."


# -- rows that FP8 cannot take ----------------------------------------------------------------------------------------


def pooled():
    """An encoder as libraries give them: its pooler runs in each forward pass, for those who want it."""

    def forward(model, x):
        sequence = model.body(x)
        return sequence, model.pooler(sequence[:, 0]).tanh()

    return net(forward, body=(32, 32), pooler=(32, 32))


def of_pooled(model, x):
    return (model(x)[1] - x[:, 0]).float().square().mean()


def rare():
    """Its second layer is called where a batch is long."""

    def forward(model, x):
        out = model.body.forward(x)
        return torch.cat([model.rare(out[:33]), out[33:]]) if len(x) > 32 else out

    return net(forward, body=(32, 32), rare=(32, 32))


def anchored():
    """Its second layer is called twice, once without a gradient."""

    def forward(model, x):
        return model.rare(model.body(x)) - model.rare(x[:9]).detach().mean(0)

    return net(forward, body=(32, 32), rare=(32, 32))


def sentences(step):
    return torch.randn(8, 16, 32)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"build": rare, "batch": rows(24)}, "layer 'body' was given 24 rows"),
        ({"build": rare, "batch": rows(32, 48)}, r"'rare' was given 33 rows .* from batch\(step=3\)"),
        ({"build": pooled, "batch": sentences, "loss": of_pooled}, "'pooler' was given 8 rows"),
    ],
    ids=["called directly", "from a step on", "pooled"],
)
def test_a_layer_with_an_odd_number_of_rows_is_named_with_the_helper(parts, named):
    with pytest.raises(TokenCountError, match=named) as error:
        serve(**parts).curve(seed=0, steps=6)
    assert "pytest_fp8.pad_to_multiple(" in error.value.fp8_next


@pytest.mark.parametrize(
    "parts",
    [
        {"build": anchored, "batch": rows(32)},
        {"build": pooled, "batch": sentences, "loss": lambda model, x: squares(lambda x: model(x)[0], x)},
        {
            "build": pooled,
            "batch": lambda step: torch.randn(8, 3, 32),
            "loss": of_pooled,
            "convert": by_torchao(pad_inner_dim=True),
        },
    ],
    ids=["without a gradient", "not used", "padded by the layer"],
)
def test_other_calls_take_any_number_of_rows(parts):
    serve(**parts).curve(seed=0, steps=2)


# -- errors of libraries ----------------------------------------------------------------------------------------------


def raised(make, *given):
    try:
        make(*given)
    except Exception as error:
        return error
    pytest.fail("no error")


def weight():
    return [nn.Parameter(torch.ones(1))]


def without_bfloat16(name):
    operator.attrgetter(name)(torch)(torch.eye(4, dtype=torch.bfloat16))


def short_schedule():
    optimizer = torch.optim.SGD(weight(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
    for _ in range(5):
        optimizer.step()
        schedule.step()


def second_derivative():
    def penalised(model, x):
        given = x.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(model(given).float().sum(), given, create_graph=True)
        return gradient.float().square().mean()

    serve(loss=penalised)


def changed_in_place():
    def forward(model, x):
        y = model.layer(x.unflatten(0, (-1, 16)))
        y *= 2
        return y

    layer = nn.Linear(32, 32, bias=False)
    serve(build=lambda: net(forward, layer=layer), loss=lambda model, x: model(x).mean())


def no_rows(recipe):
    """In the forward pass with one scale of the whole input, in the backward pass with one of each row."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)
    model(torch.randn(16, 32)[:0]).sum().backward()


def unknown_target():
    from pytest_fp8.zoo.models import add_adapters

    add_adapters(build(), 8, ("gate",))


@pytest.mark.parametrize(
    ("make", "given", "code", "says"),
    [
        (without_bfloat16, ("fft.rfft",), R.NO_BF16_OPERATOR, "x.float()"),
        (short_schedule, (), R.SCHEDULE_ENDS, "steps"),
        (second_derivative, (), R.SECOND_DERIVATIVE, "leave="),
        (changed_in_place, (), R.CHANGED_IN_PLACE, "leave="),
        (lambda: serve(build=normed), (), R.COMPUTED_WEIGHT, "leave="),
        (lambda: lbfgs(weight()).step(), (), R.NEEDS_CLOSURE, "Workload(step="),
        (nn.Linear(4, 4), (None,), R.NO_TENSOR, "batch(step)"),
        (nn.Embedding(4, 4), (3,), R.NO_TENSOR, "batch(step)"),
        (no_rows, ("tensorwise",), R.NO_ROWS, "pad_to_multiple(rows)"),
        (no_rows, ("rowwise",), R.NO_ROWS, "pad_to_multiple(rows)"),
        (unknown_target, (), R.UNKNOWN_NAME, ""),
    ],
)
def test_an_error_of_a_library_says_what_to_do(make, given, code, says):
    found, _, next_step = known_cause(raised(make, *given))
    assert found is code
    assert says in next_step


def test_batch_norms_of_all_ranks_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert known_cause(raised(nn.SyncBatchNorm(4), torch.ones(2, 4)))[0] is R.NEEDS_NCCL


@pytest.mark.parametrize(
    ("error", "mixed"),
    [
        (RuntimeError("mat1 and mat2 must have the same dtype, but got Float and BFloat16"), True),
        (RuntimeError("Input type (float) and bias type (c10::BFloat16) should be the same"), True),
        (RuntimeError("expected mat1 and mat2 to have the same dtype, but got: double != float"), False),
        (ValueError("the same dtype as BFloat16"), False),
    ],
)
def test_which_errors_are_of_mixed_types(error, mixed):
    assert (known_cause(error)[0] is R.MIXED_TYPES) == mixed


def deep_in_torch():
    nn.Sequential(nn.Sequential(nn.Linear(4, 4)))(torch.ones(2, 3))  # the user's line


def test_a_trace_keeps_the_users_frame_above_many_of_torchs():
    error = raised(deep_in_torch)
    trace = trace_of(error)
    assert "# the user's line" in trace
    assert "  ...\n" in trace
    assert trace.rstrip().endswith("shapes cannot be multiplied (2x3 and 4x4)")
    assert "# the user's line" in telling_line(error)


def test_a_trace_without_a_users_frame_says_which_line_of_this_package_asked(monkeypatch):
    # What Transformer Engine's marks once led to on one GPU: nothing but torch's frames were told.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(error_trace, "is_users", lambda filename: False)
    part = nn.Parameter(torch.ones(2))
    part.tensor_model_parallel, part.grad = True, torch.ones(2)
    assert "in norm_of_all" in trace_of(raised(norm_of_all, [part]))
