"""Hand-written steps in live arms: a small model, its batch, its loop, and what the layers question makes of them."""

from __future__ import annotations

from functools import cache

from pytest_fp8 import Case, Workload
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.ledger.evidence import ArmLedger, TwoLedgers
from pytest_fp8.worker.server import ArmServer

CASE = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True, name="loop")


def build(checkpointed=False, reentrant=False):
    """Five Linears: one, then two residual blocks of two, which may recompute their activations."""
    import torch
    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = torch.nn.Linear(32, 32)
            self.blocks = torch.nn.ModuleList([Block(), Block()])

        def forward(self, x):
            x = self.enter(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if checkpointed and self.training else block(x)
            return x

    return Net()


def batch(step):
    """96 rows."""
    import torch

    return torch.randn(96, 32)


def routed():
    """A mixture of four experts between two Linears."""
    import torch

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.router = torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
            self.leave = torch.nn.Linear(32, 32)

        def forward(self, x):
            from pytest_fp8 import pad_to_multiple

            x = self.enter(x)
            chosen, result = self.router(x).argmax(-1), torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                (rows,) = (chosen == index).nonzero(as_tuple=True)
                if len(rows):
                    result.index_add_(0, rows, expert(pad_to_multiple(x[rows]))[: len(rows)])
            return self.leave(x + result)

    return Mixture()


def loop(parts=1, clip=None, evaluate=False, set_to_none=True):
    """A step as people write it: ``parts`` micro-batches, clipping, an evaluation of 13 rows or ``evaluate``."""

    def step(model, batch, optimizer, precision):
        import torch

        total = torch.zeros(())
        optimizer.zero_grad(set_to_none=set_to_none)
        for rows in batch.chunk(parts):
            with precision():
                loss = (model(rows) - rows).float().pow(2).mean() / parts
            loss.backward()
            total += loss.detach()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(batch[: evaluate if evaluate > 1 else 13])
            model.train()
        return total

    return step


def squares(model, rows):
    return (model(rows) - rows).float().square().mean()


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
