"""The outputs that two arms compare: of any model, taken where its own loss calls it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

from helpers.carried import CASE, carried  # noqa: E402
from pytest_fp8 import Verdict  # noqa: E402
from pytest_fp8.worker.training.step import output_of, tensor_of  # noqa: E402

pytestmark = pytest.mark.slow

SMALL, LARGE = torch.zeros(2), torch.ones(3, 4)
PLAIN = replace(CASE, checkpoint_formats=("safetensors", "dcp"))


@dataclass
class Given:
    loss: Any = None
    hidden: Any = None
    logits: Any = None


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (LARGE, LARGE),
        ((SMALL, LARGE), LARGE),
        ({"a": [SMALL, {"b": LARGE}]}, LARGE),
        ({"logits": SMALL, "cache": LARGE}, SMALL),
        (Given(loss=SMALL, hidden=(LARGE,)), LARGE),
        (Given(hidden=LARGE, logits=SMALL), SMALL),
        ((torch.zeros(50, dtype=torch.long), LARGE), LARGE),
        (None, None),
        ({"text": "none"}, None),
    ],
)
def test_the_tensor_of_an_output(output, found):
    assert tensor_of(output) is found


class Nothing(torch.nn.Module):
    def forward(self, rows):
        self.kept = rows * 2


def test_a_model_that_gives_nothing_is_compared_by_its_loss():
    model = Nothing()

    def loss():
        model(SMALL)
        return model.kept.sum() + 1

    assert output_of(model, loss).item() == 1.0


def test_the_output_is_that_of_the_first_call_that_trains():
    model = torch.nn.Linear(2, 2)

    def run():
        with torch.no_grad():
            model(SMALL)
        return model(SMALL + 1)

    assert torch.equal(output_of(model, run), model(SMALL + 1).detach())


def build_text():
    """A classifier of token ids whose forward pass takes a tensor, and which has no logits."""

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(64, 32)
            self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 16)

        def forward(self, ids, mask):
            pooled = (self.embed(ids) * mask[..., None]).mean(1)
            return {"scores": (self.down(self.up(pooled).relu()),), "mask": mask}

    return Classifier()


def text(step):
    ids = torch.randint(0, 64, (32, 8))
    return {"input_ids": ids, "mask": torch.ones(32, 8), "label": ids[:, 0] % 16}


def of_text(model, batch):
    scores = model(batch["input_ids"], batch["mask"])["scores"][0]
    return torch.nn.functional.cross_entropy(scores.float(), batch["label"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_that_is_a_sum_resumes(dtype):
    def summed(model, batch):
        return (60 if dtype == "bfloat16" else 700) * of_text(model, batch).to(getattr(torch, dtype))

    decision = carried(PLAIN, build=build_text, batch=text, loss=summed)
    assert decision.verdict is Verdict.PASS, decision.message
