"""What modules give as ``get_extra_state()`` travels with a checkpoint where it is data alone, else it is named."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.loops import CASE, serve

pytestmark = pytest.mark.slow


def building(give=lambda n: {"seen": n}, take=lambda state: state["seen"], at_root=True):
    """A model whose calls count in extra state: ``give(count)``."""

    def build():
        import torch

        class Counting(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.enter, self.leave = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
                self.seen = 0

            def get_extra_state(self):
                return give(self.seen)

            def set_extra_state(self, state):
                self.seen = take(state)

            def forward(self, x):
                self.seen += self.training
                return self.leave(self.enter(x))

        return Counting() if at_root else torch.nn.Sequential(Counting())

    return build


def loss(model, batch):
    return (model(batch) - batch).float().square().mean()


def seen(server):
    return next(module.seen for module in server.engine.model.modules() if hasattr(module, "seen"))


def carried(build, folder, store="dcp"):
    """A BF16 arm's checkpoint after three steps, in an FP8 arm: its answer, and both arms' counts."""
    source, target = serve(CASE.reference(), build=build, loss=loss), serve(build=build, loss=loss)
    source.curve(seed=1, steps=3)
    target.curve(seed=2, steps=1)
    saved = source.save(str(folder), store, optimizer=True)
    loaded = target.load(str(folder), store, optimizer=True, seed=2)
    assert not loaded["refused"]
    assert loaded["digests"] == saved["digests"]
    return saved, seen(source), seen(target)


@pytest.mark.parametrize("store", ["dcp", "safetensors"])
@pytest.mark.parametrize("at_root", [True, False])
def test_a_count_in_extra_state_arrives(tmp_path, store, at_root):
    saved, mine, theirs = carried(building(at_root=at_root), tmp_path, store)
    assert saved["left_out"] == []
    assert mine == theirs > 1


def test_what_is_not_data_alone_is_left_out_and_named(tmp_path):
    saved, mine, theirs = carried(building(lambda n: {"seen": {n}}, lambda state: state["seen"].pop()), tmp_path)
    assert saved["left_out"] == ["_extra_state (a dict that is not data alone)"]
    assert mine != theirs


def test_extra_state_that_no_module_takes_is_refused(tmp_path):
    build = building()

    def forget(model):
        del type(model).set_extra_state, type(model).get_extra_state
        return model

    source = serve(CASE.reference(), build=build, loss=loss)
    target = serve(build=lambda: forget(build()), loss=loss)
    source.save(str(tmp_path), "dcp", optimizer=False)
    assert "_extra_state" in target.load(str(tmp_path), "dcp", optimizer=False, seed=1)["refused"]
