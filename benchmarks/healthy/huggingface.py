"""Models of transformers with random weights, through the loss of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import entry, module, of, pictures, text

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
ENCODER = {**SMALL, "vocab_size": 256, "max_position_embeddings": 64}
DECODER = {**SMALL, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}


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


def pretrained(name, what, model, batch=lines, learning_rate=None, **settings):
    """Enter a model of transformers, with its own loss: ``LlamaForCausalLM`` by a ``LlamaConfig``."""
    config = model.partition("For")[0] + "Config"
    entry(name, what, build=made(model, config, **settings), batch=batch, loss=None, learning_rate=learning_rate)


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


def masked(step):
    given = ids()
    hidden = torch.rand(given.shape) < 0.3
    labels = given.masked_fill(~hidden, -100)
    return {"input_ids": given.masked_fill(hidden, 3), "attention_mask": torch.ones_like(given), "labels": labels}


pretrained("hf_bert", "BERT fills masked tokens; most labels are ignored.", "BertForMaskedLM", masked, **ENCODER)


def tagging():
    return Headed(made("BertModel", "BertConfig", **ENCODER), nn.Linear(64, 2))


@of("loss", build=tagging, batch=lambda step: ids())
def hf_bert_body_of_eight_sentences(model, given):
    """BERT's body under a head for tokens: its pooler gets eight rows, and no gradient."""
    return F.cross_entropy(model(given).float().flatten(0, 1), (given > 96).long().flatten())


def first_byte(step):
    given = ids(16, 8)
    return {"input_ids": given, "labels": (given[:, 0] > 96).long()}


pretrained(
    "hf_distilbert_classifier",
    "DistilBERT classifies sequences; the head has two outputs.",
    "DistilBertForSequenceClassification",
    first_byte,
    dim=64,
    n_layers=2,
    n_heads=4,
    hidden_dim=128,
    vocab_size=256,
)


def choices(step):
    given = ids(64, 16).view(16, 4, 16)
    return {"input_ids": given, "labels": given[:, :, 0].argmax(1)}


WHAT = "BERT compares four choices in a softmax: gradients that all choices share cancel."
pretrained("hf_bert_chooses", WHAT, "BertForMultipleChoice", choices, **ENCODER)


def ends(step):
    given = ids(16, 12)
    return {"input_ids": given, "labels": given[:, 4:].clone()}


T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
STARTS = {"decoder_start_token_id": 0, "pad_token_id": 0, "feed_forward_proj": "gated-gelu"}
WHAT = "T5: an encoder and a decoder, relative places, tied embeddings."
pretrained("hf_t5", WHAT, "T5ForConditionalGeneration", ends, **T5, **STARTS)


def drawings(step):
    drawn = pictures(16, 16)
    return {"pixel_values": drawn["pixels"], "labels": drawn["labels"]}


PATCHES = {**SMALL, "image_size": 16, "patch_size": 4}
WHAT = "ViT: 17 places a picture, a classifier of ten."
pretrained("hf_vit", WHAT, "ViTForImageClassification", drawings, **PATCHES, num_labels=10)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
for _name, _what, _model, _more in (
    ("hf_llama", "Llama, grouped queries, its own loss.", "Llama", {}),
    (
        "hf_qwen3",
        "Qwen3: norms on queries and keys, tied embeddings.",
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True},
    ),
    (
        "hf_mixtral",
        "Mixtral: experts in one 3-D parameter.",
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    (
        "hf_qwen_mixture",
        "Qwen3-MoE: small experts, and a loss that balances them.",
        "Qwen3Moe",
        {**EXPERTS, "output_router_logits": True},
    ),
):
    pretrained(_name, _what, f"{_model}ForCausalLM", **DECODER, **_more)


def sounds(step):
    labels = torch.randint(3, 11, (16, 8))
    sound = 0.1 * torch.randn(16, 16, 32)
    sound[:, :, ::4] += labels[:, None, :] / 8
    return {"input_features": sound, "labels": labels}


WHISPER = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
WHISPER |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 16}
WHISPER |= {"vocab_size": 64, "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0}
WHISPER |= {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
WHAT = "Whisper: convolutions over sound, then an encoder and a decoder."
pretrained("hf_whisper", WHAT, "WhisperForConditionalGeneration", sounds, 3e-3, **WHISPER)


def hf_clip_build():
    from transformers import CLIPConfig, CLIPModel

    words = {**SMALL, "vocab_size": 256, "max_position_embeddings": 16, "eos_token_id": 255, "bos_token_id": 254}
    return CLIPModel(CLIPConfig(text_config=words, vision_config=PATCHES, projection_dim=64))


@of("batch", build=hf_clip_build, learning_rate=1e-4, loss=None)
def hf_clip(step):
    """CLIP: two towers in one model, a contrastive loss of its own."""
    drawn = pictures(32, 16)
    ids = drawn["labels"][:, None] * 8 + torch.arange(8)
    ids[:, -1] = 255
    return {"input_ids": ids, "pixel_values": drawn["pixels"], "return_loss": True}


@of("build", batch=lines, loss=None)
def hf_llama_recomputed():
    """Llama with transformers' own gradient checkpointing."""
    model = made("LlamaForCausalLM", "LlamaConfig", **DECODER)()
    model.gradient_checkpointing_enable()
    return model
