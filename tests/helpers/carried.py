"""Both arms of a case in this process, on a CPU, for the checkpoint question."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from helpers.loops import batch, build
from helpers.stand_in import StandIn
from pytest_fp8 import Case, Workload
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.checkpoints.check import check_checkpoints
from pytest_fp8.worker.server import ArmServer

CASE = Case("own", "torchao", "tensorwise", emulated=True, name="carried", checkpoint_formats=("own",))


class LiveArm:
    """An arm that answers as through the pipe: plain data."""

    def __init__(self, case, shipped):
        self._server = ArmServer(ArmSpec(case, "cpu", shipped, threads=1))
        self.facts = json.loads(json.dumps(self._server.describe()))

    def request(self, operation, **arguments):
        answer = self._server.answer(operation, arguments)
        return answer if isinstance(answer, bytes) else json.loads(json.dumps(answer))


class LivePair(StandIn):
    def __init__(self, case, folder, workload):
        shipped = workload.ship("a test")
        self._folder = folder
        self.fp8, self.bf16 = LiveArm(case, shipped), LiveArm(case.reference(), shipped)
        super().__init__(case, self.bf16, self.fp8)

    def folder(self, what):
        return self._folder

    def transfers(self):
        return self.run(lambda: transfers_of(self))


def carried(case=CASE, **parts):
    """The decision of the checkpoint question; ``parts`` are those of the :class:`Workload`."""
    workload = Workload(**{"build": build, "batch": batch, **parts})
    with tempfile.TemporaryDirectory() as folder:
        return check_checkpoints(LivePair(case, Path(folder), workload).transfers())


def through(*stores, **changes):
    """The case through these stores."""
    return replace(CASE, checkpoint_formats=stores, **changes)


def loss(model, rows):
    return (model(rows) - rows.sin()).float().pow(2).mean()


def with_model(model, optimizer, folder):
    import torch

    torch.save([model.state_dict(), optimizer.state_dict()], folder / "x.pt")


def from_model(model, optimizer, folder):
    import torch

    weights, state = torch.load(folder / "x.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
