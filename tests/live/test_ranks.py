"""Arms of two ranks in real processes, on a CPU with gloo: they train as one, users' ways are sound or told, and a rank
that fails is named. Faults of one rank: ``suites/controls/ranks.py``."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import ExitStack, closing

import pytest

pytest.importorskip("torchao")

# What HEAD imports is imported once: pytester forgets what a session imports, and torch cannot come twice.
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
import torch.distributed.fsdp
import torch.nn.parallel  # noqa: F401

from helpers.arms import all_end, call, micro, own, rank, square, two_ranks
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms import process
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import R
from pytest_fp8.shipping import ship

pytestmark = pytest.mark.slow

STEPS = 6
TOLD = 2e-3
"""Relative: a sum over the batch's parts rounds otherwise than one over the whole batch."""


@pytest.fixture
def built():
    """``built(spec)``: an arm, for the time of the test; of two ranks or, where ``alone``, of one process."""
    with ExitStack() as held:

        def build(spec, alone=False):
            arm = held.enter_context(closing(ArmProcess(fork=True)) if alone else two_ranks())
            arm.build(spec)
            return arm

        yield build


def losses(arm):
    return arm.request("curve", seed=1, steps=STEPS)["losses"]


# -- they train as one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_two_ranks_train_as_one_process_on_the_whole_batch(built, parallel):
    arm, single = (
        built(ArmSpec(micro(parallel), "cpu", threads=1)),
        built(ArmSpec(micro(), "cpu", threads=1), alone=True),
    )
    assert losses(arm) == pytest.approx(losses(single), rel=TOLD)
    assert losses(arm) == losses(arm)


def test_gradients_of_weights_that_are_marked_as_parts_and_are_whole_count_once(built):
    # As te.Linear marks each of its weights.
    def mark(model):
        for parameter in model.parameters():
            parameter.tensor_model_parallel = True

    several, alone = (
        built(ArmSpec(micro("ddp"), "cpu", threads=1)),
        built(ArmSpec(micro(), "cpu", threads=1), alone=True),
    )
    for arm in (several, alone):
        norms = arm.request("curve", seed=1, steps=2)["gradient_norms"]
        arm.request("call", function=ship(mark, "a function"))
        assert arm.request("curve", seed=1, steps=2)["gradient_norms"] == pytest.approx(norms)

    def norm(*of_ranks):
        """Of a part whose gradient is another one on each rank."""
        import torch

        from pytest_fp8.worker.record.gradients import norm_of_all

        part = torch.nn.Parameter(torch.zeros(1))
        part.tensor_model_parallel, part.grad = True, torch.tensor([of_ranks[rank()]])
        return float(norm_of_all([part]))

    assert call(several, lambda: norm(3.0, 4.0)) == 5
    assert math.isnan(call(several, lambda: norm(3.0, math.nan)))


@pytest.mark.nightly
def test_weights_gathered_in_fp8_train_alike(built):
    plain, reduced = losses(built(ArmSpec(micro(), "cpu", threads=1), alone=True)), []
    for options in ({"float8_all_gather": True}, {"float8_all_gather": True, "precompute_scale": True}):
        arm = built(ArmSpec(micro("fsdp2", options=options), "cpu", threads=1))
        assert losses(arm) == pytest.approx(plain, rel=TOLD)
        recipes = arm.request("layers")["recipes"].values()
        assert all(recipe == {"recipe": "tensorwise", **options} for recipe in recipes)
        wire = arm.request("ledger")["wire"]
        gathers = {one["dtype"] for one in wire if one["operation"] == "all-gather"}
        assert gathers == {"bfloat16", "uint8"}, "embedding and head, and the blocks"
        reduced.append(sum(one["count"] for one in wire if one["operation"] == "all-reduce"))
    # The largest magnitude of each of 14 weights, forward and backward; or all of them before the step.
    assert reduced == [28, 0]


def test_a_workloads_own_way_to_parallelize_is_called_on_each_rank(built):
    def parallelize(model, mesh):
        from torch.distributed.fsdp import fully_shard

        assert mesh.size() == 2
        fully_shard(model, mesh=mesh)

    def batch(step):
        import torch

        return torch.randn(32, 32)

    arm = built(own("own", parallelize=parallelize, batch=lambda step: batch(step).chunk(2)[rank()]))
    alone = Case("own", "torchao", "tensorwise", emulated=True)
    single = built(ArmSpec(alone, "cpu", own(batch=batch).workload, threads=1), alone=True)
    assert losses(arm) == pytest.approx(losses(single), rel=0.02)


def test_without_a_way_to_parallelize_the_workload_is_asked_for_one():
    with two_ranks() as arm, pytest.raises(ArmError, match="has no parallelize") as failure:
        arm.build(own("own"))
    assert "Workload(parallelize=" in failure.value.next_step


# -- users' own ways --------------------------------------------------------------------------------------------------

HEAD = """
import pytest
from torch import distributed as dist, nn, no_grad, randn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from pytest_fp8 import Workload


def block():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def build():
    return nn.Sequential(block(), block())


def batch(step):
    return randn(256, 64).chunk(dist.get_world_size())[dist.get_rank()]


def loss(model, x):
    return (model(x) - x.sin()).square().mean()


def asked(parallel="own", **more):
    return pytest.mark.fp8(emulated=True, gpus=2, parallel=parallel, steps=8, seeds=2, **more)


def workload(**changes):
    @pytest.fixture
    def fp8_workload():
        return Workload(**{"build": build, "batch": batch, "loss": loss, **changes})

    return fp8_workload
"""


def asks(*questions, parallel="own", **options):
    """A test that asserts these questions of the workload above it."""
    body = "\n".join(f"    fp8_pair.assert_{question}()" for question in questions)
    return f"\n@asked({parallel!r}, **{options})\ndef test(fp8_pair):\n{body}\n"


SOUND = {
    "the root has a layer and the step evaluates": """
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
"""
    + asks("layers", "numerics", options={"float8_all_gather": True}),
    # As where an exception leaves FSDP2 inside a forward pass.
    "a model that cannot be evaluated": """
class OnlyTrains(nn.Sequential):
    def forward(self, x):
        x = super().forward(x)
        assert self.training
        return x

fp8_workload = workload(build=lambda: OnlyTrains(block(), block()))
"""
    + asks("layers", "numerics", "loss", parallel="fsdp2"),
    "ranks that train alone, on one batch": """
fp8_workload = workload(batch=lambda step: randn(128, 64), parallelize=lambda model, mesh: model)

@asked()
def test(fp8_pair):
    said = fp8_pair.assert_layers().headline
    assert "nothing travelled between the ranks" in said
    assert "all ranks were given one and the same batch" in said
""",
    "the optimizer reduces": """
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
""",
    "other numbers of micro-batches": """
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
"""
    + asks("layers", "numerics", parallel="ddp"),
    "buffers and hooks of a rank's own": """
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
"""
    + asks("layers"),
    "other modules in turn, one of them in none": """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.vision, self.null = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(3, 64)

    def forward(self, x, image):
        return self.text(x) + (0 if image is None else self.vision(image))

fp8_workload = workload(
    build=Two,
    batch=lambda step: {"x": batch(step), "image": randn(128, 64) if (step + dist.get_rank()) % 2 == 0 else None},
    loss=lambda model, given: (model(**given) - given["x"].sin()).square().mean(),
    parallelize=lambda model, mesh: DistributedDataParallel(model, find_unused_parameters=True),
)

@asked()
def test(fp8_pair):
    said = fp8_pair.assert_layers().headline
    assert "was not called" not in said and "rank 1 does not call what other ranks call" in said
    fp8_pair.assert_numerics()
""",
    # FSDP2 gathers such a block after the gradient of its output came. Running statistics differ by rank, and a
    # checkpoint holds one copy. No collective takes int16.
    "blocks that end in a Linear, and statistics of each rank": """
import torch

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("codes", torch.arange(4, dtype=torch.int16))
        self.layers = nn.ModuleList([block(), block()])

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = x + layer(x)
        return x

fp8_workload = workload(build=Net)
"""
    + asks("layers", "numerics", "checkpoints", parallel="fsdp2"),
}


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_way_of_ones_own_passes(pytester, name):
    pytester.makepyfile(HEAD + SOUND[name])
    pytester.runpytest("--fp8-strict").assert_outcomes(passed=1)


IN_FP8 = """
import torch

def in_fp8(model):
    inner = getattr(model, "module", model)
    return any(isinstance(m, nn.Linear) and type(m) is not nn.Linear for m in inner.modules())
"""
TOLD_IN_WORDS = {
    # name: (module, what is said)
    # As where a variable that switches it on was not passed on to each rank.
    "a rank in BF16": (
        """
def convert(model):
    from torchao.float8 import convert_to_float8_training
    from pytest_fp8.backends.torchao import torchao_config

    if dist.get_rank() == 0:
        convert_to_float8_training(model, config=torchao_config("tensorwise", emulated=True))
    return model

fp8_workload = workload(convert=convert)
"""
        + asks("layers", parallel="ddp"),
        [f"*{R.RANKS_DISAGREE}: *"],
    ),
    "a rank without a layer": (
        """
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
"""
        + asks("layers", parallel="ddp"),
        ["*2 converted layer(s) are never called, which the reference calls*", "*never called on rank 1: b.0, b.2*"],
    ),
    "one rank's work": (
        """
def more(model, x):
    value = loss(model, x)
    if not in_fp8(model) and dist.get_rank() == 1:
        for _ in range(8):
            x = x @ torch.eye(64, dtype=x.dtype)
    return value

fp8_workload = workload(loss=more)
"""
        + asks("layers", parallel="ddp"),
        ["*INVALID FP8-D04: the arms do not do the same work: matrix products of code outside all modules*"],
    ),
    "not reduced in FP8": (
        """
def inner(model, x):
    inside = getattr(model, "module", model)
    return loss(model if type(inside[0][0]) is nn.Linear else inside, x)

fp8_workload = workload(loss=inner)
"""
        + asks("numerics", parallel="ddp"),
        ["*not reduced over the ranks in the FP8 arm alone*"],
    ),
    "a rank that drifts": (
        """
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
"""
        + asks("loss", parallel="ddp"),
        ["*differs from rank 0: weights, 0.0.weight*"],
    ),
    "a rank that loads alone": (
        """
def build_on_one():
    model = build()
    if dist.get_rank() == 0:
        with no_grad():
            model[0][0].weight.mul_(0.5)
    return model

fp8_workload = workload(build=build_on_one)
"""
        + asks("layers", parallel="ddp"),
        ["*differs from rank 0: before, 0.0.weight*", "*weights that one rank alone loads*"],
    ),
    "renamed": (
        """
def parallelize(model, mesh):
    for index in range(2):
        model[index] = checkpoint_wrapper(model[index])
    fully_shard(model, mesh=mesh)

fp8_workload = workload(parallelize=parallelize)
"""
        + asks("layers"),
        ["*no module '0.0'*", "*wrap modules in build()*"],
    ),
    "a copy": (
        """
import copy

fp8_workload = workload(parallelize=lambda model, mesh: DistributedDataParallel(copy.deepcopy(model)))
"""
        + asks("layers"),
        ["*does not hold the model that it was given*", "*wrap the model that*"],
    ),
    "what gloo lacks": (
        """
def parallelize(model, mesh):
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(4.0)

fp8_workload = workload(parallelize=parallelize)
"""
        + asks("layers"),
        ["*emulated ranks speak through gloo*", "*without emulated=True*"],
    ),
}


@pytest.mark.nightly_beyond(3)
@pytest.mark.parametrize("name", TOLD_IN_WORDS)
def test_what_is_not_sound_is_told(pytester, name):
    module, lines = TOLD_IN_WORDS[name]
    pytester.makepyfile(HEAD + IN_FP8 + module)
    result = pytester.runpytest("--fp8-strict")
    assert result.ret == 1
    result.stdout.fnmatch_lines(lines)


# -- ranks that fail --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 1.0)
    with two_ranks() as arm:
        yield arm


def raises_overflow():
    raise OverflowError("too much")


def runs_out_of_memory():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("fails", "says", "seen", "code"),
    [
        (raises_overflow, "rank 1 of 2", "OverflowError: too much", R.ARM_RAISED),
        (runs_out_of_memory, "rank 1 of 2.*ran out of GPU memory", "", R.OUT_OF_MEMORY),
    ],
)
def test_a_rank_that_raises_is_named_though_another_waits_for_it(fresh, fails, says, seen, code):
    def loss(model, batch):
        return fails() if rank() == 1 else square(model, batch)

    pids = fresh.pids
    with pytest.raises(ArmError, match=says) as failure:
        fresh.build(own(loss=loss))
    assert seen in failure.value.seen
    assert failure.value.code is code
    assert all_end(*pids)


def test_a_rank_that_dies_is_named_and_takes_the_others_along(fresh):
    fresh.build(own())
    pids = fresh.pids
    threading.Timer(0.5, os.kill, (fresh.ranks[1].pid, signal.SIGKILL)).start()
    with pytest.raises(ArmError, match=r"rank 1 of 2.*SIGKILL") as failure:
        fresh.request("curve", seed=0, steps=100_000)
    assert failure.value.code is R.ARM_DIED
    assert all_end(*pids)


def test_ranks_that_hang_show_where_they_are(fresh):
    def loss(model, batch):
        if rank() == 1 and os.environ.get("HANGS"):
            time.sleep(600)
        return square(model, batch)

    fresh.build(own(loss=loss))
    call(fresh, lambda: os.environ.update(HANGS="1"))
    pids = fresh.pids
    with pytest.raises(ArmError, match="was stopped: ranks 0, 1") as failure:
        fresh.request("curve", timeout=3, seed=0, steps=2)
    assert failure.value.code is R.ARM_HUNG
    assert "in loss" in failure.value.seen
    assert all_end(*pids)


def test_ranks_whose_collectives_do_not_fit_together_are_told_so(fresh):
    def loss(model, batch):
        import torch

        torch.distributed.all_reduce(torch.ones(4 + rank()))
        return square(model, batch)

    with pytest.raises(ArmError, match="ranks called other collectives than each other"):
        fresh.build(own(loss=loss))
