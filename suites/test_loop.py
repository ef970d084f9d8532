"""A loop as people write it, as an arm: accumulation, clipping, evaluation, lengths that are no multiple of 16.

The emulated case runs it on a micro model. On a GPU the case that is timed runs it on 1b, those that are not on 182m,
torchao's with activation checkpointing: there the loss has an answer in a tenth of the time.
"""

import pytest

from floor import assert_faster
from integrations import LOOP
from pytest_fp8 import Workload, pad_to_multiple
from pytest_fp8.zoo import data, models, training
from pytest_fp8.zoo.shapes import SHAPES

MICRO_BATCHES = 2
ROWS = 4
"""Sequences of each micro-batch on a GPU: 1b's usual batch."""
EVALUATED_EVERY = 10
SHORT_OF = 3
"""Tokens by which each sequence misses its model's usual length."""


def step(model, batch, optimizer, precision):
    """One training step; what is specific to FP8 is the padding and ``with precision()``."""
    total = 0.0
    for part in range(MICRO_BATCHES):
        rows = pad_to_multiple({name: tokens[part::MICRO_BATCHES] for name, tokens in batch.items()})
        with precision():
            loss = loss_of(model, rows) / MICRO_BATCHES
        loss.backward()
        total = total + loss.detach()
    clip(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    optimizer.steps = getattr(optimizer, "steps", 0) + 1
    if optimizer.steps % EVALUATED_EVERY == 0:
        evaluate(model, rows, precision)
    return total


def loss_of(model, rows):
    return training.cross_entropy(model(input_ids=rows["input_ids"]).logits, rows["labels"])


def clip(parameters, most):
    import torch

    torch.nn.utils.clip_grad_norm_(parameters, most)


def evaluate(model, rows, precision):
    import torch

    model.eval()
    with torch.no_grad(), precision():
        loss_of(model, rows)
    model.train()


def loop(case):
    """The workload of a case: micro on a CPU; 1b on a GPU where it is timed, 182m where it is not."""
    size, checkpointed = _size(case), case.name.endswith("_ac")
    shape = SHAPES[size]
    rows = shape.batch if size == "micro" else MICRO_BATCHES * ROWS

    def build():
        import torch

        device = "cpu" if size == "micro" else "cuda"
        dtype = torch.float32 if case.autocast else torch.bfloat16
        model = models.build(size, seed=torch.initial_seed(), device=device, dtype=dtype)
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def batch(step):
        import torch

        return data.text_batch(rows, shape.seq - SHORT_OF, torch.initial_seed() % 2**31, step)

    return Workload(build=build, batch=batch, step=step, learning_rate=shape.learning_rate)


def _size(case):
    if case.emulated:
        return "micro"
    return "1b" if case.asks("speedup") else "182m"


@pytest.fixture
def fp8_workload(fp8_case):
    return loop(fp8_case)


@pytest.mark.fp8(cases=LOOP, question="layers")
def test_each_product_of_the_loop_runs_in_fp8(fp8_pair):
    decision = fp8_pair.assert_layers()
    # Seven Linears in each of the two blocks of micro; two micro-batches.
    if fp8_pair.case.emulated:
        assert decision.numbers["roles"]["wgrad"] == {"expected": 7 * 2 * MICRO_BATCHES, "fp8": 7 * 2 * MICRO_BATCHES}


@pytest.mark.fp8(cases=LOOP, question="numerics")
def test_numerics(fp8_pair):
    fp8_pair.assert_numerics()


@pytest.mark.fp8(cases=LOOP, question="loss")
def test_the_loop_s_loss_is_right(fp8_pair):
    fp8_pair.assert_loss()


@pytest.mark.fp8(cases=LOOP, question="speedup")
def test_the_loop_is_faster(request, fp8_pair):
    assert_faster(request, fp8_pair)


@pytest.mark.fp8(cases=LOOP, question="speedup")
def test_the_loop_holds_its_baseline(fp8_pair):
    fp8_pair.assert_speedup()


@pytest.mark.fp8(cases=LOOP, question="memory")
def test_the_loop_s_memory(fp8_pair):
    fp8_pair.assert_memory()


@pytest.mark.fp8(cases=LOOP, question="checkpoints")
def test_the_loop_switches_back(fp8_pair):
    fp8_pair.assert_checkpoints()
