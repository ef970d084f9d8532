"""Models of transformers with random weights, most through the loss of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import entry, module, of, pictures, text

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
ENCODER = {**SMALL, "vocab_size": 256, "max_position_embeddings": 64}
PATCHES = {**SMALL, "image_size": 16, "patch_size": 4, "num_labels": 10}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "feed_forward_proj": "gated-gelu"}
EXPERTS = {**ENCODER, "num_key_value_heads": 2, "head_dim": 16, "output_router_logits": True}
EXPERTS |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def made(model, config, **settings):
    """A function that builds a model of transformers from its configuration."""

    def build():
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def ids(rows=8, length=16):
    return text(rows, length)["input_ids"]


def lines(step):
    """As transformers wants them: labels are the input, the model shifts them."""
    given = ids()
    return {"input_ids": given, "labels": given.clone()}


def masked(step):
    given = ids()
    hidden = torch.rand(given.shape) < 0.3
    labels = given.masked_fill(~hidden, -100)
    return {"input_ids": given.masked_fill(hidden, 3), "attention_mask": torch.ones_like(given), "labels": labels}


def choices(step):
    given = ids(64, 16).view(16, 4, 16)
    return {"input_ids": given, "labels": given[:, :, 0].argmax(1)}


def ends(step):
    given = ids(16, 12)
    return {"input_ids": given, "labels": given[:, 4:].clone()}


def drawings(step):
    drawn = pictures(16)
    return {"pixel_values": drawn["pixels"], "labels": drawn["labels"]}


for _name, _what, _model, _batch, _settings in (
    ("bert", "BERT fills masked tokens; most labels are ignored.", "BertForMaskedLM", masked, ENCODER),
    (
        "bert_chooses",
        "BERT compares four choices in a softmax: gradients that all choices share cancel.",
        "BertForMultipleChoice",
        choices,
        ENCODER,
    ),
    ("t5", "An encoder and a decoder, relative places.", "T5ForConditionalGeneration", ends, T5),
    ("vit", "17 places a picture; the loss sees one of them.", "ViTForImageClassification", drawings, PATCHES),
    ("qwen_mixture", "Experts as slices of 3-D parameters, a loss on routing.", "Qwen3MoeForCausalLM", lines, EXPERTS),
):
    _build = made(_model, _model.partition("For")[0] + "Config", **_settings)
    entry(f"hf_{_name}", _what, build=_build, batch=_batch, loss=None)


@module(lambda body, head: {"body": body(), "head": head})
def Headed(self, ids):
    """A body of transformers under a head of the user's own, for each place."""
    return self.head(self.body(input_ids=ids).last_hidden_state)


def valued():
    body = made("GPT2Model", "GPT2Config", n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=64)
    return Headed(body, nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)))


@of("loss", build=valued, batch=lambda step: {"ids": ids(32, 16)}, learning_rate=1e-4)
def hf_gpt2_with_value_head(model, batch):
    """GPT-2, whose own layers are Conv1D and no Linears, under a value head of Linears."""
    wanted = (batch["ids"] > 96).float().cumsum(1) / 16
    return F.mse_loss(model(batch["ids"]).squeeze(-1).float(), wanted)


def tagging():
    return Headed(made("BertModel", "BertConfig", **ENCODER), nn.Linear(64, 2))


@of("loss", build=tagging, batch=lambda step: ids())
def hf_bert_body_of_eight_sentences(model, given):
    """BERT's body under a head for tokens: its pooler gets eight rows, and no gradient."""
    return F.cross_entropy(model(given).float().flatten(0, 1), (given > 96).long().flatten())
