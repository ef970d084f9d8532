"""Sizes that are not multiples of 16: padding keeps the loss, and without it an error names what to do."""

from __future__ import annotations

import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torchao")

from pytest_fp8 import Case, Verdict, Workload, pad_to_multiple
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.worker.answers.token_count import TokenCountError
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.zoo import data, models, training

pytestmark = pytest.mark.slow

CASE = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True)


@pytest.mark.parametrize(("rows", "seq", "wanted"), [(3, 21, 32), (4, 21, 24), (16, 21, 21), (2, 16, 16), (1, 1, 16)])
def test_the_sequence_is_padded_to_the_next_multiple(rows, seq, wanted):
    batch = {
        "input_ids": torch.ones(rows, seq, dtype=torch.long),
        "labels": torch.ones(rows, seq, dtype=torch.long),
        "attention_mask": torch.ones(rows, seq, dtype=torch.bool),
        "inputs_embeds": torch.ones(rows, seq, 8),
        "weights": torch.ones(rows),
        "name": "one",
    }
    padded = pad_to_multiple(batch, pad_id=7)
    assert padded["input_ids"].shape == (rows, wanted)
    assert padded["inputs_embeds"].shape == (rows, wanted, 8)
    assert padded["weights"].shape == (rows,)
    assert (padded["input_ids"][:, seq:] == 7).all()
    assert (padded["labels"][:, seq:] == -100).all()
    assert not padded["attention_mask"][:, seq:].any()
    assert batch["input_ids"].shape == (rows, seq), "the batch itself stays as it was"


def test_loss_and_gradients_of_a_language_model_do_not_change():
    model = models.build("micro", seed=0, device="cpu").float()
    batch = data.text_batch(3, 21, 0, 0)

    def of(rows):
        model.zero_grad()
        loss = training.cross_entropy(model(input_ids=rows["input_ids"]).logits, rows["labels"])
        loss.backward()
        return loss, torch.cat([p.grad.flatten() for p in model.parameters()])

    loss, gradients = of(batch)
    padded_loss, padded_gradients = of(pad_to_multiple(batch))
    torch.testing.assert_close(padded_loss, loss)
    torch.testing.assert_close(padded_gradients, gradients, rtol=1e-4, atol=1e-6)


def test_rows_of_a_tensor_are_padded_with_zeros_also_where_there_are_none():
    assert pad_to_multiple(torch.ones(13, 4)).shape == (16, 4)
    assert pad_to_multiple(torch.ones(13, 4)).sum() == 52
    assert pad_to_multiple(torch.ones(0, 4)).shape == (16, 4)
    assert pad_to_multiple(torch.ones(32, 4), 32).shape == (32, 4)


def test_a_batch_without_a_sequence_is_an_error_that_lists_its_entries():
    with pytest.raises(ValueError, match=r"pixel_values \(4, 3, 8, 8\)"):
        pad_to_multiple({"pixel_values": torch.ones(4, 3, 8, 8)})
    with pytest.raises(ValueError, match=r"this list has 0 \(4,\)"):
        pad_to_multiple([torch.ones(4)])


def serve(build, batch, loss=None, step=None, convert=None):
    workload = Workload(build=build, batch=batch, loss=loss, step=step, convert=convert)
    return ArmServer(ArmSpec(CASE, "cpu", workload.ship("a test"), threads=1))


def square(model, x):
    return (model(x) - x).float().pow(2).mean()


class Routed(torch.nn.Module):
    """Sends each row to one of three experts."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(32, 3)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_experts_in_one_parameter_are_named_and_do_not_count_as_fp8():
    from transformers import MixtralConfig, MixtralForCausalLM

    def build():
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=5))

    def loss(model, batch):
        return training.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"])

    server = serve(build, lambda step: data.text_batch(4, 24, 0, step), loss)
    decision = check_layers(CASE, from_plain(LayersEvidence, server.layers()))
    assert decision.verdict is Verdict.PASS, decision.message
    assert "no Linear holds them: model.layers.0.mlp.experts.down_proj" in decision.headline
    # Attention's products are FP8; two experts' three for each token, twice as wide, are not.
    assert decision.numbers["fp8_share"] < 0.3


class Pooled(torch.nn.Module):
    """An encoder as libraries give them: its pooler runs in each forward pass, for those who want it."""

    def __init__(self):
        super().__init__()
        self.body, self.pooler = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        sequence = self.body(x)
        return sequence, self.pooler(sequence[:, 0]).tanh()


def of_sequence(model, x):
    return (model(x)[0] - x).float().square().mean()


def of_pooled(model, x):
    return (model(x)[1] - x[:, 0]).float().square().mean()


def step_of(loss):
    def step(model, batch, optimizer, precision):
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def padded_inside(model):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
    return convert_to_float8_training(model, config=config)


def test_a_layer_that_pads_its_products_takes_any_number_of_rows():
    server = serve(Pooled, lambda step: torch.randn(8, 3, 32), loss=of_pooled, convert=padded_inside)
    server.curve(seed=0, steps=2)
    decision = check_layers(CASE, from_plain(LayersEvidence, server.layers()))
    assert decision.verdict is Verdict.PASS, decision.message


def test_a_user_may_save_a_whole_converted_model():
    server = serve(one, rows(16), square)
    torch.save(server.engine.model, whole := io.BytesIO())
    whole.seek(0)
    copied = torch.load(whole, weights_only=False)
    assert copied(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward() is None, "no check goes along"
    with pytest.raises(TokenCountError):
        server.engine.model(torch.randn(8, 32, dtype=torch.bfloat16)).sum().backward()


class Rare(torch.nn.Module):
    """Its second layer is called where a batch is long."""

    def __init__(self):
        super().__init__()
        self.body, self.rare = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        out = self.body(x)
        return torch.cat([self.rare(out[:33]), out[33:]]) if len(x) > 32 else out


class Recomputed(Rare):
    """Its second layer is called with gradients in the backward pass alone."""

    def forward(self, x):
        out = self.body(x)
        return torch.cat([checkpoint(self.rare, out[:17], use_reentrant=True), out[17:]])


class Anchored(Rare):
    """Its second layer is called twice, once without a gradient."""

    def forward(self, x):
        return self.rare(self.body(x)) - self.rare(x[:9]).detach().mean(0)


def one():
    return torch.nn.Sequential(torch.nn.Linear(32, 32))


def rows(number, later=None):
    """A batch of so many rows; ``later``: from step 3 on."""
    return lambda step: torch.randn(number if later is None or step < 3 else later, 32)


def sentences(step):
    return torch.randn(8, 16, 32)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"build": Routed, "batch": rows(64), "loss": square}, r"'experts.\d' was given \d+ rows"),
        ({"build": one, "batch": rows(32, 33), "loss": square}, r"'0' was given 33 rows .* from batch\(step=3\)"),
        ({"build": Rare, "batch": rows(32, 48), "loss": square}, "'rare' was given 33 rows"),
        ({"build": Recomputed, "batch": rows(48), "loss": square}, "'rare' was given 17 rows"),
        ({"build": Pooled, "batch": sentences, "loss": of_pooled}, "'pooler' was given 8 rows"),
        ({"build": Pooled, "batch": sentences, "step": step_of(of_pooled)}, "'pooler' was given 8 rows"),
    ],
)
def test_a_layer_with_an_odd_number_of_rows_is_named_with_the_helper(parts, named):
    with pytest.raises(TokenCountError, match=named) as error:
        serve(**parts).curve(seed=0, steps=6)
    assert "pytest_fp8.pad_to_multiple(" in error.value.fp8_next


@pytest.mark.parametrize(
    "parts",
    [
        {"build": Pooled, "batch": sentences, "loss": of_sequence},
        {"build": Pooled, "batch": sentences, "step": step_of(of_sequence)},
        {"build": Anchored, "batch": rows(32), "loss": square},
    ],
)
def test_a_call_that_no_backward_pass_reaches_takes_any_number_of_rows(parts):
    serve(**parts).curve(seed=0, steps=2)
