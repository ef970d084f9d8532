"""What an arm notes of its gradients: emulated layers on the CPU, moved, repeated, and sketched."""

from base64 import b64decode

import numpy as np
import pytest
import torch

from helpers.watched import gradients, serve
from pytest_fp8.worker.record.gradients import rotated, sketch

pytestmark = pytest.mark.slow


class Codebook(torch.nn.Module):
    """A buffer that each forward pass replaces by another tensor, and that the output depends on."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.register_buffer("codes", torch.ones(64))

    def forward(self, x):
        self.codes = self.codes + 0.3 * self.codes.roll(1)
        return self.leave(self.enter(x) * self.codes)


def test_gradients_are_those_of_equal_buffers_however_often_they_are_asked():
    server = serve(build=Codebook)
    first, again = (server.numerics(moved=True) for _ in range(2))
    assert first["gradients"]["sketches"] == again["gradients"]["sketches"]
    assert first["moved"]["sketches"] == again["moved"]["sketches"]
    draws = server.moved_gradients(draws=2)
    assert len({draw["sketches"]["leave.weight"] for draw in [first["moved"], *draws]}) == 3
    assert server.moved_gradients(draws=2) == draws


def test_operands_moved_row_by_row_move_gradients_that_cancel_between_rows():
    def compare(model, x):
        scores = model(x).float().sum(-1).view(-1, 4)
        return torch.nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))

    def numbers(gradients):
        return torch.frombuffer(bytearray(b64decode(gradients["sketches"]["0.bias"])), dtype=torch.float32)

    server = serve(
        build=lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)),
        batch=lambda step: 0.1 * torch.randn(64, 32),
        loss=compare,
    )
    right = numbers(server.numerics(moved=False)["gradients"])
    weights = [(numbers(each) - right).norm() for each in server.moved_gradients(draws=4)]
    operands = [(numbers(each) - right).norm() for each in server.moved_gradients(draws=0, operands=4)]
    assert max(operands) > 2 * max(weights)
    assert torch.equal(numbers(server.numerics(moved=False)["gradients"]), right)


def test_an_arm_repeats_its_gradients_moved_weights_give_others_and_all_is_left_as_it_was():
    server = serve()
    model = server.engine.model
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    one, both = gradients(server), server.numerics(moved=True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    numbers = [np.frombuffer(b64decode(g["sketches"]["0.weight"]), dtype=np.float32) for g in (one, both["moved"])]
    assert 0.001 < np.linalg.norm(numbers[1] - numbers[0]) / np.linalg.norm(numbers[0]) < 0.3
    assert one == both["gradients"] == gradients(server)
    assert all(type(p) is torch.nn.Parameter and torch.equal(before[n], p) for n, p in model.named_parameters())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def micro_batches(model, batch, optimizer, precision):
    total = 0.0
    for part in batch.chunk(2):
        with precision():
            loss = (model(part) - part).float().pow(2).mean() / 2
        loss.backward()
        total = total + loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    optimizer.step()
    optimizer.zero_grad()
    return total


def large_batch(step):
    return torch.randn(32, 32)


def test_gradients_of_micro_batches_are_summed_and_not_clipped():
    whole = gradients(serve(batch=large_batch))["sketches"]
    parts = gradients(serve(batch=large_batch, loss=None, step=micro_batches))["sketches"]
    for name in whole:
        one, two = (np.frombuffer(b64decode(each[name]), dtype=np.float32) for each in (whole, parts))
        assert np.linalg.norm(one - two) < 0.1 * np.linalg.norm(one)


def test_a_sketch_keeps_lengths_and_angles():
    places = rotated(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(300, 500, generator=generator) for _ in range(2))
    assert float(sketch(one, 1, places).norm() / one.norm()) == pytest.approx(1, abs=0.1)
    assert float(sketch(one, 1, places) @ sketch(two, 1, places)) / (300 * 500) == pytest.approx(0, abs=0.1)
    both = sketch(one, 1, places) + sketch(two, 1, places)
    torch.testing.assert_close(sketch(one + two, 1, places), both, atol=1e-3, rtol=1e-3)
    few = torch.zeros(2048, 1024)
    few[:, 7] = 1.0
    assert float(sketch(few, 1, places).norm() / few.norm()) == pytest.approx(1, abs=0.1), "one column"
    flat = torch.ones(2048, 1024)
    assert float(sketch(flat, 1, places).norm() / flat.norm()) == pytest.approx(1, abs=0.1), "rank one"
