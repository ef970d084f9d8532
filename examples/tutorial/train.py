"""Train a Llama on the bytes of Python's own standard library:

python train.py          in BF16
python train.py --fp8    in FP8 (torchao, tensorwise); without a GPU the same numbers are computed on the CPU
"""

import argparse
import os
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


def options(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--rate", type=float, default=3e-4, help="the highest learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps until the highest learning rate")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fp8", action="store_true")
    return parser.parse_args(words)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, turn):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x, turn):
        x = x + self.attention(self.attention_norm(x), turn)
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(length), 10_000 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turn)
        return self.head(self.norm(x))


def rotate(x, turn):
    """Rotary positions."""
    (cos, sin), (a, b) = turn, x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def make_model(given):
    return Llama(given.layers, given.width, given.heads, given.length)


def to_fp8(model):
    """Every Linear but the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    if not model.head.weight.is_cuda:
        config = replace(config, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")


def make_optimizer(parameters, given):
    optimizer = torch.optim.AdamW(parameters, lr=given.rate, betas=(0.9, 0.95), fused=True)
    optimizer.scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / given.warmup, total_iters=given.warmup)
    return optimizer


@cache
def text():
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def make_batch(given):
    starts = torch.randint(len(text()) - given.length - 1, (given.rows,))
    windows = torch.stack([text()[start : start + given.length + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train_step(model, batch, optimizer):
    tokens, targets = batch
    loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def main():
    given = options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = make_model(given).to(device, torch.bfloat16)
    if given.fp8:
        to_fp8(model)
    if device == "cuda":
        for block in model.blocks:
            block.compile()
    optimizer = make_optimizer(model.parameters(), given)
    start = time.perf_counter()
    for step in range(given.steps):
        batch = [part.to(device) for part in make_batch(given)]
        loss = train_step(model, batch, optimizer)
        if step % 10 == 9:
            seconds, start = (time.perf_counter() - start) / 10, time.perf_counter()
            print(f"step {step + 1}: loss {loss.item():.4f}, {1e3 * seconds:.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
