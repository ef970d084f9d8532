"""What a stranger gets wrong in a workload: each is one plain error, and no trace of a library's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchao")

from helpers.nets import CASE, batch, build, loop, serve, squares
from pytest_fp8 import Case, Workload
from pytest_fp8.arms.pool import Arm
from pytest_fp8.codes import R
from pytest_fp8.errors import SettingsError
from pytest_fp8.shipping import ship
from pytest_fp8.worker.error_trace import known_cause
from pytest_fp8.worker.token_count import TokenCountError
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow

INDEXED = "batches[step % len(batches)]"


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        ({"build": torch.nn.Linear(2, 2)}, "Linear Linear(in_features=2"),
        ({"build": None}, "NoneType None"),
        ({"batch": torch.ones(2)}, "Tensor tensor"),
        ({"batch": [1, 2]}, "list"),
        ({"batch": lambda: torch.ones(2)}, "too many positional arguments"),
        ({"build": torch.nn.Linear}, "missing a required argument: 'in_features'"),
        ({"loss": lambda rows: rows.mean()}, "too many positional arguments"),
        ({"loss": lambda model, x, y: x}, "missing a required argument: 'y'"),
        ({"step": lambda model, batch, optimizer: None}, "too many positional arguments"),
        ({"optimizer": torch.optim.AdamW([torch.ones(1, requires_grad=True)])}, "AdamW"),
        ({"leave": ("head")}, "'head'"),
        ({"leave": (3,)}, "(3,), a tuple"),
    ],
)
def test_what_is_no_function_of_these_arguments_is_refused_at_once(wrong, seen):
    with pytest.raises(SettingsError) as error:
        Workload(**{"build": build, "batch": batch, **wrong})
    assert seen in error.value.seen
    assert next(iter(wrong)) in error.value.headline
    assert error.value.next_step


@pytest.mark.parametrize(
    "given",
    [
        {"build": torch.nn.Flatten},
        {"optimizer": torch.optim.AdamW},
        {"batch": lambda *_: torch.ones(2)},
        {"batch": torch.ones},
        {"loss": lambda model, x, scale=2: x},
        {"leave": ("head",)},
        {"leave": ["head", "*.router"]},
        {"learning_rate": 1, "version": 2},
        {"version": "tuned"},
    ],
)
def test_classes_defaults_and_open_arguments_are_fine(given):
    Workload(**{"build": build, "batch": batch, **given})


@pytest.mark.parametrize(
    ("given", "loss", "code", "words", "next_step"),
    [
        (lambda step: iter([torch.ones(32, 32)]), squares, R.BAD_BATCH, "it gave a list_iterator", INDEXED),
        (lambda step: next(iter([])), squares, R.BAD_BATCH, "it gave StopIteration in step 0", INDEXED),
        (lambda step: (batch(step), batch(step)), None, R.NO_TENSOR, None, ""),
        (lambda step: None, None, R.BAD_BATCH, None, ""),
    ],
)
def test_what_is_not_one_batch_or_none_of_this_model_has_its_code(given, loss, code, words, next_step):
    with pytest.raises((TypeError, WorkloadError), match=words) as error:
        serve(batch=given, loss=loss)
    assert known_cause(error.value)[0] is code
    assert next_step in known_cause(error.value)[2]


def test_a_result_that_no_process_can_be_sent_is_named_as_one():
    server = serve()
    with pytest.raises(TypeError, match="a generator, cannot be sent back") as error:
        server.call(ship(lambda model: (value for value in model.parameters()), "the function"))
    assert "list(...)" in error.value.fp8_next


@pytest.mark.parametrize("given", [None, 3, lambda: 3, torch.nn.Linear(2, 2)])
def test_what_an_arm_is_asked_to_call_must_be_a_function_of_the_model(given):
    with pytest.raises(SettingsError, match=r"what call\(\) was given"):
        Arm.call(None, given)


@pytest.mark.parametrize(
    ("given", "words", "next_step"),
    [
        (lambda: build().requires_grad_(False), "Net, of whose 10 parameters none is trained", "unfrozen in build"),
        (torch.nn.Sequential, "Sequential, of whose 0 parameters", "with its layers"),
    ],
)
@pytest.mark.parametrize("loss", [squares, None])
def test_a_model_that_cannot_be_trained_is_named_and_not_its_loss(given, words, next_step, loss):
    with pytest.raises(WorkloadError, match=words) as error:
        serve(build=given, loss=loss)
    assert next_step in error.value.fp8_next
    assert ".item()" not in error.value.fp8_cause


def test_a_model_that_is_frozen_in_part_is_fine():
    def partly():
        model = build().requires_grad_(False)
        model.blocks.requires_grad_(True)
        return model

    serve(build=partly)


def test_an_error_inside_the_model_stays_the_users_own():
    class Wrong(torch.nn.Module):
        def forward(self, x):
            return x + None

    def wrong():
        return torch.nn.Sequential(build(), Wrong())

    with pytest.raises(TypeError, match="unsupported operand") as error:
        serve(build=wrong)
    assert not isinstance(error.value, WorkloadError)


def short_last(step):
    """A loader's batches: five whole ones, then 13 rows."""
    return batch(step)[: 13 if step == 5 else 96]


@pytest.mark.parametrize("parts", [{}, {"step": loop()}], ids=["loss", "step"])
def test_a_short_last_batch_is_named_with_its_rows_and_what_to_do(parts):
    server = serve(batch=short_last, **parts)
    server.curve(seed=1, steps=5)
    with pytest.raises(
        TokenCountError, match=r"given 13 rows .* from batch\(step=5\) of seed 1 \(\(13, 32\)\)"
    ) as error:
        server.curve(seed=1, steps=6)
    assert "drop_last=True" in error.value.fp8_next
    assert "multiples of 16" in error.value.fp8_cause


def transposed():
    class Transposed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(32, 32)

        def forward(self, x):
            x = x.unflatten(0, (-1, 16))
            return self.last(self.mix(x.transpose(1, 2)).transpose(1, 2).flatten(0, 1))

    return Transposed()


def test_rowwise_with_an_input_that_is_not_contiguous_says_what_to_do():
    serve(CASE, build=transposed)
    rowwise = Case(model="own", backend="torchao", recipe="rowwise", emulated=True, name="loop")
    with pytest.raises(AssertionError) as error:
        serve(rowwise, build=transposed)
    code, _, next_step = known_cause(error.value)
    assert code is R.NOT_CONTIGUOUS
    assert "x.contiguous()" in next_step
