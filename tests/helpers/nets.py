"""Small models and what trains them: conversions, steps and optimizers as people write them; live arms of them on a
CPU, and what the layers question makes of these."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.healthy import own_fp8
from benchmarks.healthy.own_fp8 import Product
from pytest_fp8 import Case, Workload, pad_to_multiple
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.ledger.evidence import ArmLedger, TwoLedgers
from pytest_fp8.worker.server import ArmServer

CASE = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True, name="loop")


# -- models -----------------------------------------------------------------------------------------------------------


def net(forward, **parts):
    """A model of these parts, each a module or a Linear's sizes, that computes ``forward(model, x)``."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, nn.Linear(*part) if isinstance(part, tuple) else part)

        def forward(self, x):
            return forward(self, x)

    return Net()


def build(checkpointed=False, reentrant=False):
    """Five Linears: one, then two residual blocks of two, which may recompute their activations."""

    def block():
        return net(lambda block, x: x + block.down(functional.gelu(block.up(x))), up=(32, 64), down=(64, 32))

    def forward(model, x):
        x = model.enter(x)
        for each in model.blocks:
            x = checkpoint(each, x, use_reentrant=reentrant) if checkpointed and model.training else each(x)
        return x

    return net(forward, enter=nn.Linear(32, 32), blocks=nn.ModuleList([block(), block()]))


def batch(step):
    """96 rows."""
    return torch.randn(96, 32)


def routed():
    """A mixture of four experts between two Linears."""

    def forward(model, x):
        x = model.enter(x)
        chosen, result = model.router(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(model.experts):
            (rows,) = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                result.index_add_(0, rows, expert(pad_to_multiple(x[rows]))[: len(rows)])
        return model.leave(x + result)

    enter, router = nn.Linear(32, 32), nn.Linear(32, 4)
    experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    return net(forward, enter=enter, router=router, experts=experts, leave=(32, 32))


def by_torchao(but=(), then=lambda model: None, **config):
    """A conversion of all Linears ``but`` these, which changes the model ``then``."""

    def convert(model):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        chosen = Float8LinearConfig(emulate=True, **config)
        converted = convert_to_float8_training(model, config=chosen, module_filter_fn=lambda _, name: name not in but)
        then(converted)
        return converted

    return convert


class OwnLinear(nn.Module):
    """No class that a library knows. ``on()``: whether it multiplies in FP8 now."""

    def __init__(self, old, function=Product, on=lambda layer: True):
        super().__init__()
        self.weight, self.bias, self.function, self.on = old.weight, old.bias, function, on

    def forward(self, x):
        if self.on(self):
            return self.function.apply(x, self.weight) + self.bias
        return functional.linear(x, self.weight, self.bias)


with_own_layers = partial(own_fp8.with_own_layers, kind=OwnLinear)


# -- steps and optimizers ---------------------------------------------------------------------------------------------


def squares(model, rows):
    return (model(rows) - rows).float().square().mean()


def loop(parts=1, clip=None, evaluate=False, set_to_none=True):
    """A step as people write it: ``parts`` micro-batches, clipping, an evaluation of 13 rows or ``evaluate``."""

    def step(model, batch, optimizer, precision):
        total = torch.zeros(())
        optimizer.zero_grad(set_to_none=set_to_none)
        for rows in batch.chunk(parts):
            with precision():
                loss = squares(model, rows) / parts
            loss.backward()
            total += loss.detach()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(batch[: evaluate if evaluate > 1 else 13])
            model.train()
        return total

    return step


def closing(keyword=False):
    """A step whose optimizer is given a closure, by position or by ``keyword``."""

    def step(model, batch, optimizer, precision):
        def closure():
            optimizer.zero_grad()
            with precision():
                loss = squares(model, batch)
            loss.backward()
            return loss

        return (optimizer.step(closure=closure) if keyword else optimizer.step(closure)).detach()

    return step


def lbfgs(parameters):
    """Calls its closure twice in each step."""
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation: a second gradient from weights that are moved and then restored."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        weights = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in weights]
        for p in weights:
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for p, old in zip(weights, before, strict=True):
            p.copy_(old)
        super().step()
        return loss


def sam(parameters):
    return SAM(parameters, lr=0.1)


# -- live arms --------------------------------------------------------------------------------------------------------


def serve(case=CASE, **parts):
    """A live arm on the CPU; ``parts`` are those of its :class:`Workload`, whose loss is :func:`squares` by default."""
    loss = {} if {"step", "trainer"} & parts.keys() else {"loss": squares}
    workload = Workload(**{"build": build, "batch": batch, **loss, **parts})
    return ArmServer(ArmSpec(case, "cpu", workload.ship("a test"), threads=1))


def judge(server, case=CASE):
    """The layers question's decision on a live arm."""
    return check_layers(case, from_plain(LayersEvidence, server.layers()))


def judge_both(case=CASE, **parts):
    """The layers question's decision on both live arms, their ledgers included."""
    fp8 = serve(case, **parts)
    evidence = from_plain(LayersEvidence, fp8.layers())
    return check_layers(case, evidence, ledgers=ledgers(case, fp8, **parts))


def ledger_of(server):
    return from_plain(ArmLedger, server.ledger())


@cache
def plain_reference():
    """Of the reference that all conversions of this model are held against."""
    return ledger_of(serve(CASE.reference()))


def ledgers(case=CASE, fp8=None, reference=None, **parts):
    """The ledgers of two live arms; each is built with ``parts`` where it is not given."""
    plain = case == CASE and reference is None and parts.keys() <= {"convert"}
    one = plain_reference() if plain else ledger_of(reference or serve(case.reference(), **parts))
    return TwoLedgers(one, ledger_of(fp8 or serve(case, **parts)), case.backend)
