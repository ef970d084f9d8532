"""``pytest-fp8 watch`` names the ways in which FP8 gets lost: a script for each, as a user would write it."""

from __future__ import annotations

import pytest

from helpers.watching import script
from pytest_fp8.codes import W
from pytest_fp8.watch.report import report

pytestmark = pytest.mark.slow


def codes(training):
    return [note.code for note in training.notes]


PLAIN = "model = Model(nn.Linear).bfloat16()\n"
RUN = "train(model, torch.optim.AdamW(model.parameters()))\n"
CONVERT = """
def converted(old):
    new = Float8Linear(old.in_features, old.out_features, bias=False)
    new.weight = nn.Parameter(old.weight.detach().clone())
    return new
"""
STORED = """
class Stored(nn.Module):
    def __init__(self, inputs, outputs, bias):
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs).mul(0.1).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(torch.bfloat16))


model = Model(Stored)
model.embed.bfloat16(), model.lm_head.bfloat16()
"""
AROUND = """
def around(self, x):
    return x + F.linear(F.relu(self.up(x)), self.down.weight)


Block.forward = around
model = Model().bfloat16()
"""
RECOMPUTED = """
from torch.utils.checkpoint import checkpoint


def forward(ids):
    Float8Linear.roles = ("fprop", "dgrad", "wgrad")
    x = checkpoint(model.blocks[1], model.blocks[0](model.embed(ids)), use_reentrant=False)
    logits = model.lm_head(x)
    Float8Linear.roles = ("dgrad", "wgrad")  # the autocast ends here, and recomputation comes later
    return logits


model = Model().bfloat16()
train(model, torch.optim.AdamW(model.parameters()), forward=forward)
"""
TYPO = """
for block in model.blocks:
    for name in ("up", "down"):
        if name != "donw":
            setattr(block, name, converted(getattr(block, name)))
            break
"""
TOO_LATE = """
optimizer = torch.optim.AdamW(model.parameters())
for block in model.blocks:
    block.up, block.down = converted(block.up), converted(block.down)
train(model, optimizer)
"""
MODEL = "model = Model().bfloat16()\n"
FALLS_BACK = "Float8Linear.on = torch.cuda.is_available()\n"
FAILURES = {
    "nothing read it": (PLAIN + RUN, "OFF", [W.NOTHING_READ_IT]),
    "a filter's typo": (PLAIN + CONVERT + TYPO + RUN, "ON", [W.LEFT_OUT]),
    "converted too late": (PLAIN + CONVERT + TOO_LATE, "ON", [W.CONVERTED_TOO_LATE]),
    "no wgrad": ("Float8Linear.roles = ('fprop', 'dgrad')\n" + MODEL + RUN, "ON", [W.FORWARD_ALONE]),
    "stored alone": (STORED + RUN, "OFF", [W.STORED_ONLY]),
    "stepped around": (AROUND + RUN, "ON", [W.STEPPED_AROUND]),
    "recomputed": (RECOMPUTED, "ON", [W.RECOMPUTED_OTHERWISE]),
    "no hardware": (FALLS_BACK + MODEL + RUN, "OFF", [W.NO_HARDWARE]),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_script_that_loses_fp8(tmp_path, python_with_torch, name):
    text, verdict, expected = FAILURES[name]
    training = python_with_torch.watched(
        script(tmp_path, text), **({"USE_FP8": "1"} if name == "nothing read it" else {})
    )
    said = "\n".join(report([training]))
    assert (training.verdict, codes(training)) == (verdict, expected), said
    assert all(note.code in said for note in training.notes)
    assert len(said.splitlines()) <= 25


EVALUATES = """
model = Model().bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
forward = torch.compile(model, backend="aot_eager") if {compiled} else None
for step in range(9):
    Float8Linear.on = {on}
    model.eval()
    with torch.{without}():
        for part in range(2):
            print("evaluated", model(torch.randint(0, 48, (8, 16))).sum().item())
    model.train()
    Float8Linear.on = True
    train(model, optimizer, steps=1, forward=forward)
"""


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize(
    ("without", "on", "compiled"),
    [("no_grad", False, False), ("no_grad", True, False), ("inference_mode", True, False), ("no_grad", True, True)],
)
def test_an_evaluation_is_told_from_the_step(tmp_path, python_with_torch, without, on, compiled):
    """The operators without gradients before the forward pass; the sums are those of a step that has none."""
    text = EVALUATES.format(without=without, on=on, compiled=compiled)
    training = python_with_torch.watched(script(tmp_path, text))
    assert training.share == pytest.approx(32 / 35), training.why
    assert training.found.rows == 96
    assert [len(products) for each in training.found.classes for products in each.products.values()] == 6 * [2] + 3 * [
        1
    ]
    assert [product.kind == "fp8" for product in training.window.evaluated] == 2 * [*(4 * [on]), False]
    assert training.notes == []
    said = " ".join("\n".join(report([training])).split())
    assert f"an evaluation came before it, not counted here: 10 products, {8 * on} of them in FP8" in said


TRAINER = """
import tempfile
from transformers import Trainer, TrainingArguments


class Losing(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model(nn.Linear)

    def forward(self, ids):
        return {"loss": F.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())}


data = [{"ids": torch.randint(0, 48, (24,))} for _ in range(16)]
arguments = TrainingArguments(tempfile.mkdtemp(), bf16=True, use_cpu=True, max_steps=8, report_to=[],
                              save_strategy="no", per_device_train_batch_size=4, label_names=["ids"])
Trainer(Losing(), arguments, train_dataset=data).train()
"""


@pytest.mark.nightly
def test_bf16_of_the_trainer_wins(tmp_path, python_with_torch):
    training = python_with_torch.watched(script(tmp_path, TRAINER), ACCELERATE_MIXED_PRECISION="fp8")
    assert (training.verdict, codes(training)) == ("OFF", [W.OTHER_SETTING_DECIDES])
    assert "TrainingArguments(bf16=True)" in training.notes[0].text
    assert dict(training.found.classes[0].kinds("fprop")) == {"bfloat16": 2}, "under autocast, weights in float32"


TORCHAO = """
import sys
from dataclasses import replace
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

config = Float8LinearConfig.from_recipe_name("tensorwise")
kept = {"filter": lambda module, name: "layer" in name}.get(sys.argv[1], lambda module, name: "head" not in name)
config = replace(config, emulate=sys.argv[1] == "emulated")
model = Model(nn.Linear).bfloat16()
convert_to_float8_training(model, config=config, module_filter_fn=kept)
if sys.argv[1] == "stepped around":
    model.blocks[1].up.forward = torch.compiler.disable(model.blocks[1].up.forward)
forward = torch.compile(model, backend="aot_eager") if sys.argv[1] in ("compiled", "stepped around") else model
train(model, torch.optim.AdamW(model.parameters()), forward=forward)
"""


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize(
    ("how", "verdict", "expected", "first"),
    [
        ("filter", "OFF", [W.NOTHING_CONVERTED], "torchao.float8"),
        ("stepped around", "ON", [W.NOT_COMPILED], "9 of 12"),
        ("compiled", "ON", [], ""),
        ("uncompiled", "ON", [W.NOT_COMPILED], "none of"),
        ("emulated", "ON", [], ""),
    ],
)
def test_torchao(tmp_path, python_with_torch, how, verdict, expected, first):
    training = python_with_torch.watched(script(tmp_path, TORCHAO), how)
    assert (training.verdict, codes(training)) == (verdict, expected)
    assert training.emulated == (how == "emulated")
    assert not expected or training.notes[0].text.startswith(first)
    assert verdict == "OFF" or training.share > 0.8
