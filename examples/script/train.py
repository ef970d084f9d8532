"""A training script from top to bottom, without functions to import: python train.py --fp8"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--rate", type=float, default=1e-3)
parser.add_argument("--fp8", action="store_true")
parser.add_argument("--seed", type=int)
given = parser.parse_args()
if given.seed is not None:
    torch.manual_seed(given.seed)

ROWS, CONTEXT = 256, 16
device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8)


def get_batch():
    starts = torch.randint(len(text) - CONTEXT - 1, (ROWS,))
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, -1].contiguous()


model = nn.Sequential(
    nn.Embedding(256, given.width // 2),
    nn.Flatten(),
    nn.Linear(CONTEXT * given.width // 2, 4 * given.width),
    nn.GELU(),
    nn.Linear(4 * given.width, given.width),
    nn.GELU(),
    nn.Linear(given.width, 256),
).to(device)

if given.fp8:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=device == "cpu")
    convert_to_float8_training(model, config=config)

optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
for step in range(given.steps):
    tokens, targets = (part.to(device) for part in get_batch())
    with torch.autocast(device, torch.bfloat16):
        loss = functional.cross_entropy(model(tokens).float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.4f}")
