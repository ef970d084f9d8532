"""Models of many kinds: attention, recurrent layers, pictures, experts; shared weights; models of transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from benchmarks.healthy.sound import (
    Net,
    classes_of,
    entry,
    lines,
    mlp,
    model,
    module,
    next_byte,
    of,
    pictures,
    text,
    toward,
    vectors,
)
from pytest_fp8 import pad_to_multiple

# -- sequences --------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """An embedding, blocks, a head."""

    def __init__(self, *blocks):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids))))


class Tied(Language):
    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.head.weight = self.embed.weight


@module(lambda: {"norm": nn.LayerNorm(64), "up": nn.Linear(64, 128), "down": nn.Linear(128, 64)})
def Block(self, x):
    return x + self.down(F.gelu(self.up(self.norm(x))))


@module(lambda: {"norm": nn.LayerNorm(64), "qkv": nn.Linear(64, 192, bias=False), "out": nn.Linear(64, 64)})
def Attention(self, x):
    """Scores and values are plain products of activations."""
    q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() / 4
    scores = scores + torch.full_like(scores, float("-inf")).triu(1)
    return x + self.out(torch.matmul(scores.softmax(-1).to(v.dtype), v).transpose(1, 2).flatten(2))


@module(lambda reentrant: {"reentrant": reentrant}, base=Attention)
def Recomputed(self, x):
    return checkpoint(lambda x: Attention.forward(self, x), x, use_reentrant=self.reentrant)


@module(
    lambda: {
        "q": nn.Parameter(0.1 * torch.randn(64, 64)),
        "k": nn.Parameter(0.1 * torch.randn(64, 64)),
        "v": nn.Linear(64, 64, bias=False),
        "out": nn.Linear(64, 64, bias=False),
    }
)
def RawQueries(self, x):
    mixed = F.scaled_dot_product_attention(x @ self.q, F.linear(x, self.k), self.v(x), is_causal=True)
    return x + self.out(mixed)


for _name, _what, _build in (
    (
        "recomputed_blocks",
        "The model recomputes its attention in the backward pass, in both of torch's ways.",
        lambda: Language(Recomputed(False), Block(), Recomputed(True)),
    ),
    (
        "one_block_called_three_times",
        "ALBERT's way: the same block, three times in a row and by three names.",
        lambda: Language(*3 * [Attention(), Block()]),
    ),
    (
        "raw_parameters_of_a_linears_size",
        "Raw parameters, multiplied by @ and F.linear at the size of the Linears beside them.",
        lambda: Language(RawQueries(), Block()),
    ),
    ("tied_embeddings", "The output projection is the embedding.", lambda: Tied(Attention(), Block())),
):
    entry(_name, _what, build=_build, batch=lines, loss=next_byte)


@of("build", batch=lambda step: vectors(128).unflatten(0, (8, 16)), loss=toward(lambda x: x.roll(1, 1).sin()))
def transformer_encoder():
    """nn.TransformerEncoder: its attention uses a Linear's weight past the layer, and in eval mode all of it does."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(64, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


@model(
    lambda: {
        "latents": nn.Parameter(0.1 * torch.randn(16, 64)),
        "q": nn.Linear(64, 64),
        "kv": nn.Linear(64, 128),
        "out": nn.Linear(64, 64),
        "block": Block(),
    },
    batch=lambda step: vectors(16 * 9).unflatten(0, (16, 9)),
    loss=toward(lambda x: x.amax(1)),
)
def learnt_latents(self, x):
    """Perceiver: a raw parameter goes through Linears; the batch has an odd number of rows in each sequence."""
    q = self.q(self.latents).expand(len(x), -1, -1)
    k, v = self.kv(x).chunk(2, -1)
    return self.block(self.out(F.scaled_dot_product_attention(q, k, v))).mean(1)


def clipped_by_a_hook(parameters):
    held = list(parameters)
    optimizer = torch.optim.AdamW(held, lr=1e-3)

    def clip(*_):
        nn.utils.clip_grad_norm_(held, 1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def sequences_of_several_lengths(step):
    made = text(8, 16)
    lengths = torch.randint(4, 17, (8,))
    padded = torch.arange(16) >= lengths[:, None]
    return {**made, "labels": made["labels"].masked_fill(padded, -100), "lengths": lengths}


@model(
    lambda: {
        "embed": nn.Embedding(256, 64),
        "recur": nn.LSTM(64, 64, batch_first=True, num_layers=2, dropout=0.1),
        "hidden": nn.Linear(64, 64),
        "head": nn.Linear(64, 256),
    },
    batch=sequences_of_several_lengths,
    loss=lambda model, batch: next_byte(lambda ids: model(ids, batch["lengths"]), batch),
    optimizer=clipped_by_a_hook,
)
def packed_sequences(self, ids, lengths):
    """Sequences of several lengths through a packed LSTM; a hook of the optimizer clips the gradient."""
    packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
    states, _ = pad_packed_sequence(self.recur(packed)[0], batch_first=True, total_length=ids.shape[1])
    return self.head(self.hidden(states).relu())


# -- pictures ---------------------------------------------------------------------------------------------------------


def drawn(step):
    return pictures(32)


def classify(model, batch):
    return F.cross_entropy(model(batch["pixels"]).float(), batch["labels"])


@model(
    lambda: {
        "stem": nn.Conv2d(3, 32, 2, stride=2),
        "depthwise": nn.Conv2d(32, 32, 7, padding=3, groups=32),
        "norm": nn.BatchNorm2d(32),
        "mlp": mlp(32, 128, 32),
        "head": nn.Linear(256, 10),
    },
    batch=drawn,
    loss=classify,
)
def convolution_net(self, x):
    """Convolutions and BatchNorm beside Linears whose input has four dimensions."""
    x = self.stem(x)
    x = x + self.mlp(self.norm(self.depthwise(x)).permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)
    return self.head(x.mean(3).flatten(1))


@model(
    lambda: {
        "patches": nn.Conv2d(3, 64, 4, stride=4),
        "across": mlp(16, 64, 16),
        "along": mlp(64, 128, 64),
        "norms": nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)]),
        "head": nn.Linear(64, 10),
    },
    batch=drawn,
    loss=classify,
)
def mlp_mixer(self, pixels):
    """Linears along places and along channels in turn; 16 places are the smallest size that FP8 takes."""
    x = self.patches(pixels).flatten(2).transpose(1, 2)
    x = x + self.across(self.norms[0](x).transpose(1, 2).contiguous()).transpose(1, 2)
    return self.head((x + self.along(self.norms[1](x))).mean(1))


def two_views(model, batch):
    x = batch["pixels"]
    one, two = (model(x + 0.3 * torch.randn_like(x)) for _ in range(2))
    return F.cross_entropy(model.scale.float().exp() * one @ two.T, torch.arange(len(x), device=x.device))


@model(
    lambda: {
        "body": nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 128), nn.ReLU()),
        "project": nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64)),
        "scale": nn.Parameter(torch.tensor(1.6)),
    },
    batch=drawn,
    loss=two_views,
)
def two_views_of_a_picture(self, x):
    """A model called twice in one step (SimCLR); a product of its outputs, and a parameter without dimensions."""
    return F.normalize(self.project(self.body(x)).float(), dim=-1)


# -- parameters -------------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """A backbone and what is put on top of it."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(mlp(), nn.LayerNorm(64), mlp())
        self.top = mlp()

    def forward(self, x):
        return self.top(self.backbone(x))


@of("build")
def partly_frozen():
    """Frozen layers at the input, whose products have no backward pass, and frozen ones that pass gradients on."""
    model = Backbone()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" not in name and not name.startswith(("backbone.0", "backbone.2.0")))
    return model


def critic():
    return nn.Sequential(
        spectral_norm(nn.Linear(64, 64)),
        nn.LeakyReLU(0.2),
        weight_norm(nn.Linear(64, 64)),
        nn.LeakyReLU(0.2),
        mlp(),
        nn.Linear(64, 16),
    )


@of("loss", build=critic, leave=("0", "2"))
def normed_critic(model, x):
    """spectral_norm, which moves its vectors in every forward pass, and weight_norm, both named by `leave`."""
    real, made = model(x).float().mean(1), model(x.flip(1).sin() * 2).float().mean(1)
    return F.relu(1 - real).mean() + F.relu(1 + made).mean()


@module(
    lambda inside, outside: {
        "base": nn.Linear(inside, outside).requires_grad_(False),
        "a": nn.Parameter(0.1 * torch.randn(inside, 16)),
        "b": nn.Parameter(torch.zeros(16, outside)),
    }
)
def LowRank(self, x):
    return self.base(x) + (x @ self.a) @ self.b


entry(
    "adapters_by_hand",
    "A frozen base and low-rank raw parameters beside it.",
    build=lambda: nn.Sequential(LowRank(64, 128), nn.GELU(), LowRank(128, 64)),
    learning_rate=3e-3,
)


@model(
    lambda: {
        "body": Net(),
        "base": nn.Linear(64, 64).requires_grad_(False),
        "a": nn.Parameter(0.1 * torch.randn(16, 64)),
        "b": nn.Parameter(torch.zeros(64, 16)),
    },
    leave=("base",),
)
def merged_lora(self, x):
    """LoRA that multiplies once, with the merged weight; the frozen Linear holds the base alone."""
    weight = self.base.weight.clone()
    weight += self.b @ self.a
    return F.linear(self.body(x), weight, self.base.bias)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return None


@model(lambda: {"body": Net(), "side": nn.Linear(64, 64)})
def no_gradient(self, x):
    """A Linear whose output a function of the user's own gives no gradient."""
    return self.body(x) + 0.01 * Rounded.apply(self.side(x))


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


@model(lambda: {"body": mlp(), "last": nn.Linear(64, 64), "weight": nn.Parameter(0.1 * torch.randn(64, 64))})
def own_autograd_function(self, x):
    """A product whose backward pass is written by hand."""
    return self.last(OwnProduct.apply(self.body(x), self.weight))


@model(lambda: {"left": mlp(), "right": mlp(), "last": nn.Linear(64, 64)})
def branches_in_threads(self, x):
    """Layers that are called at the same time."""
    with ThreadPoolExecutor(2) as pool:
        left, right = pool.submit(self.left, x), pool.submit(self.right, x)
        return self.last(left.result() + right.result())


def with_commitment(model, x):
    made, commitment = model(x)
    return (made - x.sin()).float().square().mean() + 0.25 * commitment


@model(lambda: {"encode": mlp(), "decode": mlp(), "codes": torch.randn(32, 64)}, loss=with_commitment)
def moving_codebook(self, x):
    """Buffers that move in the forward pass (a vector-quantised bottleneck), chosen by an argmin."""
    seen = self.encode(x)
    chosen = torch.cdist(seen.detach().float(), self.codes.float()).argmin(1)
    code = self.codes[chosen]
    if self.training and torch.is_grad_enabled():
        with torch.no_grad():
            self.codes.index_add_(0, chosen, 0.01 * (seen.detach() - code))
    return self.decode(seen + (code - seen).detach()), F.mse_loss(seen.float(), code.float().detach())


def odd():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 100), nn.ReLU(), nn.Linear(100, 10))


@of("loss", build=odd, learning_rate=3e-3)
def odd_sizes(model, x):
    """Layers of 100 and 10 features, which FP8 cannot take, beside one that it can."""
    return F.cross_entropy(model(x).float(), classes_of(x, 10))


class Cast(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@of("build")
def layer_that_casts():
    """A Linear of the user's own that casts its weight to its input's type."""
    model = Net()
    model.up, model.down = Cast(64, 128), Cast(128, 64)
    return model


@model(
    lambda: {
        "experts": nn.ModuleList(nn.Linear(64, 64) for _ in range(2)).to(torch.bfloat16),
        "body": Net().to(torch.bfloat16),
        "router": nn.Linear(64, 16),
        "norm": nn.LayerNorm(64),
    },
    leave=("router",),
)
def router_in_float32(self, x):
    """A router and a norm that build() left in float32 beside a model in bfloat16."""
    share = self.router(self.norm(x.float()))[:, :2].softmax(-1)
    assert share.dtype == torch.float32
    made = sum(share[:, [index]] * expert(x).float() for index, expert in enumerate(self.experts))
    return self.body((x + made).to(x.dtype))


# -- what strains the numerics (benchmarks/numerics) ------------------------------------------------------------------


def scaled():
    scale = torch.ones(64)
    scale[::21] = 200.0
    return {"scale": scale, "body": nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), mlp(128))}


@model(scaled)
def outliers(self, x):
    """Four of 64 channels are 200 times as large as the others, as in trained language models."""
    return self.body(x * self.scale)


@model(lambda: {"enter": nn.Linear(64, 128), "again": nn.Linear(128, 128), "leave": nn.Linear(128, 64)})
def often(self, x):
    """One layer called eight times in a step, as in a recurrent net."""
    state = self.enter(x)
    for _ in range(8):
        state = torch.tanh(self.again(state) + state)
    return self.leave(state)


@of("build")
def deep():
    """Sixteen residual blocks with dropout."""
    return nn.Sequential(*(nn.Sequential(Block(), nn.Dropout(0.1)) for _ in range(16)))


# -- experts ----------------------------------------------------------------------------------------------------------


@model(
    lambda count=4, last=0.0: {
        "router": nn.Linear(64, count, bias=False),
        "experts": nn.ModuleList(mlp() for _ in range(count)),
        "bias": torch.tensor([0.0] * (count - 1) + [last]),
    },
    batch=lambda step: vectors(256),
)
def routed(self, x):
    """A router that sends each row to one of four experts: small changes send some another way."""
    weight, chosen = (self.router(x).float() + self.bias.float()).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for index in chosen.unique().tolist():
        row = (chosen == index).nonzero().flatten()
        out = out.index_add(0, row, self.experts[index](pad_to_multiple(x[row]))[: len(row)])
    return weight.to(x.dtype)[:, None] * out


entry("an_expert_that_rests", "One of six experts gets hardly any rows.", build=lambda: routed(6, -4.0))


@model(
    lambda: {
        "enter": nn.Linear(64, 64),
        "gate": nn.Linear(64, 4),
        "up": nn.Parameter(0.1 * torch.randn(4, 64, 128)),
        "down": nn.Parameter(0.1 * torch.randn(4, 128, 64)),
    }
)
def experts_in_one_parameter(self, x):
    """Experts in 3-D parameters, through bmm and einsum, behind one Linear."""
    x = self.enter(x)
    weights = self.gate(x).float().softmax(-1).to(x.dtype)
    each = torch.bmm(F.gelu(torch.bmm(x.expand(4, -1, -1), self.up)), self.down)
    return torch.einsum("ne,enw->nw", weights, each)


@model(
    lambda: {
        "enter": nn.Linear(64, 64),
        "leave": nn.Linear(64, 64),
        "router": nn.Linear(64, 4),
        "weights": nn.Parameter(0.1 * torch.randn(4, 64, 64)),
    },
    learning_rate=4e-3,
)
def grouped_product(self, x):
    """Rows sorted by expert, through torch's grouped_mm, between two Linears."""
    x = self.enter(x)
    weight, chosen = self.router(x).float().softmax(-1).max(-1)
    order = chosen.argsort()
    ends = chosen.bincount(minlength=4).cumsum(0).to(torch.int32)
    done = F.grouped_mm(x[order], self.weights, offs=ends)
    back = torch.empty_like(done).index_copy(0, order, done)
    return self.leave(F.gelu(back * weight.to(x.dtype)[:, None]))


# -- of transformers, with random weights, most through the loss of their own ------------------------------------------

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


def tokens(rows=8, length=16):
    return text(rows, length)["input_ids"]


def shifted(step):
    """As transformers wants them: labels are the input, the model shifts them."""
    given = tokens()
    return {"input_ids": given, "labels": given.clone()}


def masked_ids(step):
    given = tokens()
    hidden = torch.rand(given.shape) < 0.3
    labels = given.masked_fill(~hidden, -100)
    return {"input_ids": given.masked_fill(hidden, 3), "attention_mask": torch.ones_like(given), "labels": labels}


def choices(step):
    given = tokens(64, 16).view(16, 4, 16)
    return {"input_ids": given, "labels": given[:, :, 0].argmax(1)}


def ends(step):
    given = tokens(16, 12)
    return {"input_ids": given, "labels": given[:, 4:].clone()}


def drawings(step):
    drawn = pictures(16)
    return {"pixel_values": drawn["pixels"], "labels": drawn["labels"]}


for _name, _what, _model, _batch, _settings in (
    ("bert", "BERT fills masked tokens; most labels are ignored.", "BertForMaskedLM", masked_ids, ENCODER),
    (
        "bert_chooses",
        "BERT compares four choices in a softmax: gradients that all choices share cancel.",
        "BertForMultipleChoice",
        choices,
        ENCODER,
    ),
    ("t5", "An encoder and a decoder, relative places.", "T5ForConditionalGeneration", ends, T5),
    ("vit", "17 places a picture; the loss sees one of them.", "ViTForImageClassification", drawings, PATCHES),
    (
        "qwen_mixture",
        "Experts as slices of 3-D parameters, a loss on routing.",
        "Qwen3MoeForCausalLM",
        shifted,
        EXPERTS,
    ),
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


@of("loss", build=valued, batch=lambda step: {"ids": tokens(32, 16)}, learning_rate=1e-4)
def hf_gpt2_with_value_head(model, batch):
    """GPT-2, whose own layers are Conv1D and no Linears, under a value head of Linears."""
    wanted = (batch["ids"] > 96).float().cumsum(1) / 16
    return F.mse_loss(model(batch["ids"]).squeeze(-1).float(), wanted)


def tagging():
    return Headed(made("BertModel", "BertConfig", **ENCODER), nn.Linear(64, 2))


@of("loss", build=tagging, batch=lambda step: tokens())
def hf_bert_body_of_eight_sentences(model, given):
    """BERT's body under a head for tokens: its pooler gets eight rows, and no gradient."""
    return F.cross_entropy(model(given).float().flatten(0, 1), (given > 96).long().flatten())
