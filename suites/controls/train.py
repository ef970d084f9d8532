"""The script that ``scripts.py`` runs: a small training with FP8 and without, and words that break it."""

import argparse
import os
import signal
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--fp8", action="store_true")
parser.add_argument("--steps", type=int, default=4000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--rows-seed", type=int, help="of the batches; default: --seed")
parser.add_argument("--rate", type=float, default=1e-3)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--passes", type=int, default=1, help="backward passes of a step")
parser.add_argument("--tf32", action="store_true")
parser.add_argument("--eval", action="store_true", help="train in eval mode")
parser.add_argument("--float32-head", action="store_true")
parser.add_argument("--late", action="store_true", help="convert after the optimizer was made")
parser.add_argument("--layers", type=int, default=4, help="how many of the four are converted")
parser.add_argument("--keep", action="store_true", help="keep the layers that are converted")
parser.add_argument("--at", type=int, default=8, help="the step in which --then comes")
parser.add_argument("--then", choices=["nan", "error", "memory", "exit", "hang", "SIGKILL"])
given = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(given.seed)
torch.backends.cuda.matmul.allow_tf32 = given.tf32
rows = torch.Generator().manual_seed(given.seed if given.rows_seed is None else given.rows_seed)


def cast(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = 448 / values.abs().max().clamp(min=1e-12).float()
    return (values.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale.reciprocal()


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    (one, scale_a), (two, scale_b) = cast(left), cast(right.t().contiguous())
    product: torch.Tensor = torch._scaled_mm(one, two.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    return product


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return multiply(gradient, weight), multiply(gradient.t().contiguous(), x)


class Float8Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = Product.apply(x.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        return rows.view(*x.shape[:-1], self.out_features)


def convert(model: nn.Sequential) -> None:
    """Put FP8 layers in place of the first Linears, with weights of their own of the same values."""
    linears = [(place, layer) for place, layer in enumerate(model) if isinstance(layer, nn.Linear)]
    for place, linear in linears[: given.layers]:
        converted = Float8Linear(linear.in_features, linear.out_features, bias=False).bfloat16()
        converted.load_state_dict(linear.state_dict())
        model[place] = converted


sizes = [(64, 128), (128, 64), (64, 128), (128, 64)]
model: Any = nn.Sequential(
    nn.Embedding(48, 64),
    *(layer for size in sizes for layer in (nn.Linear(*size, bias=False), nn.ReLU())),
    nn.Linear(64, 48, bias=False),
).bfloat16()
kept = list(model) if given.keep else []
if given.fp8 and not given.late:
    convert(model)
model.train(not given.eval)
if given.float32_head:
    model[-1].register_forward_pre_hook(lambda head, rows: (rows[0].float(),))
    model[-1].forward = lambda rows: functional.linear(rows, model[-1].weight.float())
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    rows.manual_seed(torch.distributed.get_rank())
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate)
if given.fp8 and given.late:
    convert(model)

for step in range(given.steps):
    for _ in range(given.passes):
        ids = torch.randint(0, 48, (given.batch, 24), generator=rows)
        loss = functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
        if step == given.at and given.then == "nan":
            loss = loss * float("nan")
        loss.backward()
    if step == given.at and given.then == "error":
        raise ValueError("no data")
    if step == given.at and given.then == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if step == given.at and given.then == "exit":
        break
    if step == given.at and given.then == "hang":
        time.sleep(10_000)
    if step == given.at and given.then == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
