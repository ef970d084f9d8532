"""Models of transformers with random weights, through the loss of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import pictures, sound, text
from pytest_fp8 import Workload

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DECODER = {**SMALL, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}


def made(model, config, **settings):
    """A function that builds a model of transformers from its configuration."""

    def build():
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def lines(step):
    """As transformers wants them: labels are the input, the model shifts them."""
    ids = text(8, 16)["input_ids"]
    return {"input_ids": ids, "labels": ids.clone()}


@sound()
def hf_llama():
    """Llama, grouped queries, its own loss."""
    return Workload(build=made("LlamaForCausalLM", "LlamaConfig", **DECODER), batch=lines)


@sound()
def hf_qwen3():
    """Qwen3: norms on queries and keys, tied embeddings."""
    settings = {**DECODER, "head_dim": 16, "tie_word_embeddings": True}
    return Workload(build=made("Qwen3ForCausalLM", "Qwen3Config", **settings), batch=lines)


@sound()
def hf_gemma2():
    """Gemma2: soft caps, sliding windows, tied and scaled embeddings."""
    return Workload(build=made("Gemma2ForCausalLM", "Gemma2Config", **DECODER, head_dim=16), batch=lines)


@sound()
def hf_gpt2_with_value_head():
    """GPT-2, whose own layers are Conv1D and no Linears, under a value head of Linears."""

    class Valued(nn.Module):
        def __init__(self):
            from transformers import GPT2Config, GPT2Model

            super().__init__()
            self.body = GPT2Model(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=64))
            self.value = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))

        def forward(self, ids):
            return self.value(self.body(input_ids=ids).last_hidden_state).squeeze(-1)

    def loss(model, batch):
        wanted = (batch["ids"] > 96).float().cumsum(1) / 16
        return F.mse_loss(model(batch["ids"]).float(), wanted)

    return Workload(build=Valued, batch=lambda step: {"ids": text(32, 16)["input_ids"]}, loss=loss, learning_rate=1e-4)


@sound()
def hf_bert():
    """BERT fills masked tokens; most labels are ignored."""

    def batch(step):
        ids = text(8, 16)["input_ids"]
        hidden = torch.rand(ids.shape) < 0.3
        mask = torch.ones_like(ids)
        labels = ids.masked_fill(~hidden, -100)
        return {"input_ids": ids.masked_fill(hidden, 3), "attention_mask": mask, "labels": labels}

    settings = {**SMALL, "vocab_size": 256, "max_position_embeddings": 64}
    return Workload(build=made("BertForMaskedLM", "BertConfig", **settings), batch=batch)


@sound()
def hf_bert_body_of_eight_sentences():
    """BERT's body under a head for tokens: its pooler gets eight rows, and no gradient."""

    class Tagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = made("BertModel", "BertConfig", **SMALL, vocab_size=256, max_position_embeddings=64)()
            self.tags = nn.Linear(64, 2)

        def forward(self, ids):
            return self.tags(self.body(input_ids=ids).last_hidden_state)

    def loss(model, ids):
        return F.cross_entropy(model(ids).float().flatten(0, 1), (ids > 96).long().flatten())

    return Workload(build=Tagged, batch=lambda step: text(8, 16)["input_ids"], loss=loss)


@sound()
def hf_distilbert_classifier():
    """DistilBERT classifies sequences; the head has two outputs."""

    def batch(step):
        ids = text(16, 8)["input_ids"]
        return {"input_ids": ids, "labels": (ids[:, 0] > 96).long()}

    settings = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 256}
    return Workload(build=made("DistilBertForSequenceClassification", "DistilBertConfig", **settings), batch=batch)


@sound()
def hf_bert_chooses():
    """BERT compares four choices in a softmax: gradients that all choices share cancel."""

    def batch(step):
        ids = text(64, 16)["input_ids"].view(16, 4, 16)
        return {"input_ids": ids, "labels": ids[:, :, 0].argmax(1)}

    settings = {**SMALL, "vocab_size": 256, "max_position_embeddings": 64}
    return Workload(build=made("BertForMultipleChoice", "BertConfig", **settings), batch=batch)


@sound()
def hf_t5():
    """T5: an encoder and a decoder, relative places, tied embeddings."""
    settings = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256}

    def batch(step):
        ids = text(16, 12)["input_ids"]
        return {"input_ids": ids, "labels": ids[:, 4:].clone()}

    starts = {"decoder_start_token_id": 0, "pad_token_id": 0, "feed_forward_proj": "gated-gelu"}
    return Workload(build=made("T5ForConditionalGeneration", "T5Config", **settings, **starts), batch=batch)


@sound()
def hf_vit():
    """ViT: 17 places a picture, a classifier of ten."""
    settings = {**SMALL, "image_size": 16, "patch_size": 4, "num_labels": 10}

    def batch(step):
        drawn = pictures(16, 16)
        return {"pixel_values": drawn["pixels"], "labels": drawn["labels"]}

    return Workload(build=made("ViTForImageClassification", "ViTConfig", **settings), batch=batch)


@sound()
def hf_mixtral():
    """Mixtral: experts in one 3-D parameter."""
    settings = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
    return Workload(build=made("MixtralForCausalLM", "MixtralConfig", **settings), batch=lines)


@sound()
def hf_qwen_mixture():
    """Qwen3-MoE: small experts, and a loss that balances them."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    settings = {**DECODER, **experts, "output_router_logits": True}
    return Workload(build=made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **settings), batch=lines)


@sound()
def hf_whisper():
    """Whisper: convolutions over sound, then an encoder and a decoder."""
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    more = {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 16}
    tokens = {"vocab_size": 64, "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0}
    starts = {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}

    def batch(step):
        labels = torch.randint(3, 11, (16, 8))
        sound = 0.1 * torch.randn(16, 16, 32)
        sound[:, :, ::4] += labels[:, None, :] / 8
        return {"input_features": sound, "labels": labels}

    build = made("WhisperForConditionalGeneration", "WhisperConfig", **sizes, **more, **tokens, **starts)
    return Workload(build=build, batch=batch, learning_rate=3e-3)


@sound()
def hf_clip():
    """CLIP: two towers in one model, a contrastive loss of its own."""

    def build():
        from transformers import CLIPConfig, CLIPModel

        words = {**SMALL, "vocab_size": 256, "max_position_embeddings": 16, "eos_token_id": 255, "bos_token_id": 254}
        return CLIPModel(
            CLIPConfig(text_config=words, vision_config={**SMALL, "image_size": 16, "patch_size": 4}, projection_dim=64)
        )

    def batch(step):
        drawn = pictures(32, 16)
        ids = drawn["labels"][:, None] * 8 + torch.arange(8)
        ids[:, -1] = 255
        return {"input_ids": ids, "pixel_values": drawn["pixels"], "return_loss": True}

    return Workload(build=build, batch=batch, learning_rate=1e-4)


@sound()
def hf_llama_recomputed():
    """Llama with transformers' own gradient checkpointing."""

    def build():
        model = made("LlamaForCausalLM", "LlamaConfig", **DECODER)()
        model.gradient_checkpointing_enable()
        return model

    return Workload(build=build, batch=lines)


@sound()
def hf_llama_with_own_loss():
    """Llama's body under the user's own loss with a z-term; the batch has the key input_ids."""

    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()[:, :-1]
        wanted = batch["input_ids"][:, 1:]
        entropy = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        return entropy + 1e-4 * logits.logsumexp(-1).square().mean()

    return Workload(build=made("LlamaForCausalLM", "LlamaConfig", **DECODER), batch=lines, loss=loss)
