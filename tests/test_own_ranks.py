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
