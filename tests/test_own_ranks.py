"""Users' own ways to train on several ranks, emulated on two processes: what is sound passes, what is not is told."""

from __future__ import annotations

import pytest

from helpers.own_ranks import HEAD

pytestmark = pytest.mark.slow

THE_ROOT_HAS_A_LAYER_AND_THE_STEP_EVALUATES = """
def evaluate(model, x, precision):
    with no_grad(), precision():
        loss(model, x)

def step(model, x, optimizer, precision):
    evaluate(model, x, precision)
    with precision():
        value = loss(model, x)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    evaluate(model, x, precision)
    return value.detach()

fp8_workload = workload(
    build=lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)),
    loss=None,
    step=step,
    parallelize=lambda model, mesh: [fully_shard(part, mesh=mesh) for part in (model[0], model)][-1],
)

@asked(options={"float8_all_gather": True})
def test(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
"""
GIVES_THE_LOSS = """
class Train(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return loss(self.net, x)

fp8_workload = workload(
    loss=lambda model, x: model(x), parallelize=lambda model, mesh: DistributedDataParallel(Train(model))
)

@asked()
def test(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_checkpoints()
"""
OTHER_MODULES = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.vision = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, image):
        return self.text(x) + (0 if image is None else self.vision(image))

fp8_workload = workload(
    build=Two,
    batch=lambda step: {"x": batch(step), "image": randn(128, 64) if (step + dist.get_rank()) % 2 == FIRST else None},
    loss=lambda model, given: (model(**given) - given["x"].sin()).square().mean(),
    parallelize=lambda model, mesh: DistributedDataParallel(model, find_unused_parameters=True),
)

@asked()
def test(fp8_pair):
    said = fp8_pair.assert_layers().headline
    assert "was not called" not in said and f"rank {1 - FIRST} does not call what other ranks call" in said
"""
REDUCES_LATE = """
import torch

def reduce(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())

def hooked(parameters):
    optimizer = torch.optim.AdamW(parameters, 1e-3)
    optimizer.register_step_pre_hook(reduce)
    return optimizer

fp8_workload = workload(optimizer=hooked, parallelize=lambda model, mesh: model)

@asked()
def test(fp8_pair):
    assert "unless the optimizer reduces gradients" in fp8_pair.assert_layers().headline
    assert "gradients differ between the ranks in both arms" in fp8_pair.assert_numerics().headline
    fp8_pair.assert_loss()
"""


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize(
    "module",
    [
        THE_ROOT_HAS_A_LAYER_AND_THE_STEP_EVALUATES,
        REDUCES_LATE,
        *(
            pytest.param(module, marks=pytest.mark.nightly)
            for module in (
                GIVES_THE_LOSS,
                f"FIRST = 0\n{OTHER_MODULES}",
            )
        ),
    ],
)
def test_a_sound_way_of_ones_own_passes(pytester, module):
    pytester.makepyfile(HEAD + module)
    pytester.runpytest("--fp8-strict").assert_outcomes(passed=1)


DRIFTS = """
def step(model, x, optimizer, precision):
    with precision():
        value = loss(model, x)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        with no_grad():
            model.module[0][0].weight.mul_(0.9)
    return value.detach()

fp8_workload = workload(loss=None, step=step)

@asked("ddp")
def test(fp8_pair):
    fp8_pair.assert_loss()
"""
LOADS_ALONE = """
def build_on_one():
    model = build()
    if dist.get_rank() == 0:
        with no_grad():
            model[0][0].weight.mul_(0.5)
    return model

fp8_workload = workload(build=build_on_one)

@asked("ddp")
def test(fp8_pair):
    fp8_pair.assert_layers()
"""
RENAMED = """
def parallelize(model, mesh):
    for index in range(2):
        model[index] = checkpoint_wrapper(model[index])
    fully_shard(model, mesh=mesh)

fp8_workload = workload(parallelize=parallelize)

@asked()
def test(fp8_pair):
    fp8_pair.assert_layers()
"""
LEAVES_OUT = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = block(), block()

    def forward(self, x):
        x = self.a(x)
        if dist.get_rank() == 1 and type(self.b[0]) is not nn.Linear:
            return x + sum(parameter.sum() for parameter in self.b.parameters()) * 0
        return self.b(x)

fp8_workload = workload(build=Two)

@asked("ddp")
def test(fp8_pair):
    fp8_pair.assert_layers()
"""
NOT_REDUCED_IN_FP8 = """
def inner(model, x):
    inside = getattr(model, "module", model)
    return loss(model if type(inside[0][0]) is nn.Linear else inside, x)

fp8_workload = workload(loss=inner)

@asked("ddp")
def test(fp8_pair):
    fp8_pair.assert_numerics()
"""
A_COPY = """
import copy

fp8_workload = workload(parallelize=lambda model, mesh: DistributedDataParallel(copy.deepcopy(model)))

@asked()
def test(fp8_pair):
    fp8_pair.assert_layers()
"""


@pytest.mark.nightly_beyond(3)
@pytest.mark.parametrize(
    ("module", "lines"),
    [
        (
            LEAVES_OUT,
            [
                "*2 converted layer(s) are never called, which the reference calls*",
                "*never called on rank 1: b.0, b.2*",
            ],
        ),
        pytest.param(
            NOT_REDUCED_IN_FP8,
            ["*not reduced over the ranks in the FP8 arm alone*"],
            marks=pytest.mark.nightly,
        ),
        (A_COPY, ["*does not hold the model that it was given*", "*wrap the model that*"]),
        (DRIFTS, ["*differs from rank 0: weights, 0.0.weight*"]),
        (LOADS_ALONE, ["*differs from rank 0: before, 0.0.weight*", "*weights that one rank alone loads*"]),
        (RENAMED, ["*no module '0.0'*", "*wrap modules in build()*"]),
    ],
)
def test_what_is_not_is_told_in_words(pytester, module, lines):
    pytester.makepyfile(HEAD + module)
    result = pytester.runpytest()
    assert result.ret == 1
    result.stdout.fnmatch_lines(lines)


def test_ranks_that_train_alone_are_told_beside_a_pass(pytester):
    pytester.makepyfile(
        HEAD
        + """
fp8_workload = workload(parallelize=lambda model, mesh: model)

@asked()
def test(fp8_pair):
    assert "nothing travelled between the ranks" in fp8_pair.assert_layers().headline
"""
    )
    pytester.runpytest().assert_outcomes(passed=1)


# -- what may differ between ranks, and faults of one rank alone ------------------------------------------------------

OTHER_NUMBERS_OF_MICRO_BATCHES = """
from contextlib import nullcontext

def step(model, x, optimizer, precision):
    total, parts = 0.0, x.split(48 if dist.get_rank() else 64)
    for index, part in enumerate(parts):
        with model.no_sync() if index < len(parts) - 1 else nullcontext():
            with precision():
                value = loss(model, part) * len(part) / len(x)
            value.backward()
        total += value.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total

fp8_workload = workload(loss=None, step=step)

@asked("ddp")
def test(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
"""
OWN_BUFFERS_AND_HOOKS = """
import torch

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = block(), block()
        self.register_buffer("rank", torch.tensor(dist.get_rank()), persistent=False)
        if dist.get_rank() == 0:
            for parameter in self.parameters():
                parameter.register_hook(lambda gradient: None)

    def forward(self, x):
        return self.b(self.a(x))

fp8_workload = workload(
    build=Net, parallelize=lambda model, mesh: DistributedDataParallel(model, broadcast_buffers=False)
)

@asked()
def test(fp8_pair):
    fp8_pair.assert_layers()
"""
IMAGES = """
import torch

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.vision = block(), nn.Linear(64, 64)
        self.null, self.out = nn.Linear(3, 64), nn.Linear(64, 64)

    def forward(self, x, image):
        x = self.text(x)
        return self.out(x + (0 if image is None else self.vision(image)))

def images(step):
    return {"x": batch(step), "image": randn(128, 64) if (step + dist.get_rank()) % 2 == 0 else None}

def sines(model, given):
    return (model(**given) - given["x"].sin()).square().mean()
"""
REDUCED_WITH_A_LAYER_UNUSED = (
    IMAGES
    + """
def step(model, given, optimizer, precision):
    with precision():
        value = sines(model, given)
    value.backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("null"):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(2)
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()

fp8_workload = workload(build=Two, batch=images, loss=None, step=step, parallelize=lambda model, mesh: model)

@asked()
def test(fp8_pair):
    fp8_pair.assert_numerics()
"""
)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(OTHER_NUMBERS_OF_MICRO_BATCHES, id="micro-batches"),
        pytest.param(OWN_BUFFERS_AND_HOOKS, id="buffers and hooks"),
        pytest.param(REDUCED_WITH_A_LAYER_UNUSED, id="a layer unused", marks=pytest.mark.nightly),
    ],
)
def test_ranks_may_differ_where_training_is_sound(pytester, module):
    pytester.makepyfile(HEAD + module)
    pytester.runpytest("--fp8-strict").assert_outcomes(passed=1)


IN_FP8 = """
import torch

def in_fp8(model):
    inner = getattr(model, "module", model)
    return any(isinstance(m, nn.Linear) and type(m) is not nn.Linear for m in inner.modules())
"""
WRONG_NOW_AND_THEN = """
def parallelize(model, mesh):
    if in_fp8(model) and dist.get_rank() == 1:
        layer, calls = model[0][2], [0]
        forward = layer.forward

        def wrong(x):
            calls[0] += 1
            return forward(x) * (0.5 if calls[0] % 8 == 5 else 1.0)

        layer.forward = wrong
    return DistributedDataParallel(model)

fp8_workload = workload(parallelize=parallelize)

@pytest.mark.fp8(emulated=True, gpus=2, parallel="own", seeds=2)
def test(fp8_pair):
    fp8_pair.assert_loss()
"""
MORE_WORK = """
def more(model, x):
    value = loss(model, x)
    if not in_fp8(model) and dist.get_rank() == 1:
        for _ in range(8):
            x = x @ torch.eye(64, dtype=x.dtype)
    return value

fp8_workload = workload(loss=more)

@asked("ddp")
def test(fp8_pair):
    fp8_pair.assert_layers()
"""
ONE_RANK_S_GRADIENTS = """
FP8 = []

def parallelize(model, mesh):
    FP8.append(in_fp8(model))
    return model

class Reducing(torch.optim.AdamW):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if FP8[-1]:
                dist.broadcast(parameter.grad, 0)
            else:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(2)
        return super().step(closure)

fp8_workload = workload(optimizer=lambda given: Reducing(given, 1e-3), parallelize=parallelize)

@asked()
def test(fp8_pair):
    fp8_pair.assert_loss()
"""


@pytest.mark.parametrize(
    ("module", "line"),
    [
        pytest.param(WRONG_NOW_AND_THEN, "*a layer's product is wrong in some steps*", marks=pytest.mark.nightly),
        (MORE_WORK, "*INVALID FP8-D04: the arms do not do the same work: matrix products of code outside all modules*"),
        (ONE_RANK_S_GRADIENTS, "*the same gradients*"),
    ],
    ids=["wrong now and then", "more work", "one rank's gradients"],
)
def test_a_fault_of_one_rank_alone_is_seen(pytester, module, line):
    pytester.makepyfile(HEAD + IN_FP8 + module)
    result = pytester.runpytest("--fp8-strict")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([line])


def test_what_gloo_lacks_is_told(pytester):
    pytester.makepyfile(
        HEAD
        + """
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(4.0)

fp8_workload = workload(parallelize=parallelize)

@asked()
def test(fp8_pair):
    fp8_pair.assert_layers()
"""
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*emulated ranks speak through gloo*", "*without emulated=True*"])
