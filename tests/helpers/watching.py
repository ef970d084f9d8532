"""What small training scripts begin with, and a process that runs them, watched, in forks of one that has torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from pytest_fp8.watch.command import INJECTED, evidence_in
from pytest_fp8.watch.judge import Training, judge

ROOT = Path(__file__).parents[2]

OWN_FP8 = '''
import torch
from torch import nn
from torch.nn import functional as F


def q(x):
    scale = 448 / x.abs().max().clamp(min=1e-12).float()
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale.reciprocal()


def multiply(a, b):
    (one, scale_a), (two, scale_b) = q(a), q(b.t().contiguous())
    return torch._scaled_mm(one, two.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


class Product(torch.autograd.Function):
    """FP8 in the products that `roles` has."""

    @staticmethod
    def forward(ctx, x, weight, roles):
        ctx.save_for_backward(x, weight)
        ctx.roles = roles
        return multiply(x, weight.t()) if "fprop" in roles else x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        dgrad = multiply(gradient, weight) if "dgrad" in ctx.roles else gradient @ weight
        if not ctx.needs_input_grad[1]:
            return dgrad, None, None
        turned = gradient.t().contiguous()
        return dgrad, multiply(turned, x) if "wgrad" in ctx.roles else turned @ x, None


class Float8Linear(nn.Linear):
    on, roles = True, ("fprop", "dgrad", "wgrad")

    def forward(self, x):
        if not Float8Linear.on:
            return F.linear(x, self.weight)
        rows = x.reshape(-1, x.shape[-1])
        return Product.apply(rows, self.weight, self.roles).reshape(*x.shape[:-1], self.out_features)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up, self.down = kind(64, 128, bias=False), kind(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, kind=Float8Linear):
        super().__init__()
        self.embed = nn.Embedding(48, 64)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.lm_head = nn.Linear(64, 48, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def train(model, optimizer, steps=8, forward=None):
    """Prints the losses: what a watched and an unwatched run must have in common."""
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 48, (4, 24), generator=torch.Generator().manual_seed(step))
        logits = (model if forward is None else forward)(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("losses", losses)


torch.manual_seed(0)
torch.set_num_threads(1)
'''
"""What the scripts begin with: FP8 through ``torch._scaled_mm``, which a CPU has, without a library to import."""


def environment(**more: str) -> dict[str, str]:
    """Few steps are timed; nothing asks for FP8 from outside."""
    quiet = {"FP8_WATCH_STEPS": "2", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT), **more}


def start(folder: str) -> None:
    """Have this process watched, as one in which torch was just imported."""
    file = INJECTED / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("injected", file)
    injected = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(injected)
    injected.FOLDER, injected.Waiting.waits = folder, False
    injected.observe(sys.modules["torch.optim.optimizer"])


SERVES = """
import atexit, json, os, runpy, signal, socket, sys, traceback
import torch, torch._dynamo
import pytest_fp8.watch.held
from helpers.watching import start

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen(9)
print("ready", flush=True)
while True:
    client = server.accept()[0]
    asked = json.loads(client.makefile().readline())
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        client.sendall(str(code).encode())
        os._exit(0)
    log, code = os.open(asked["log"], os.O_WRONLY | os.O_APPEND), 0
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ.clear(), os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv = asked["words"]
    try:
        start(os.environ["PYTEST_FP8_WATCH_FOLDER"])
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
"""
ASKS = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
asked = {"words": sys.argv[2:], "env": dict(os.environ), "log": os.readlink("/proc/self/fd/1"), "cwd": os.getcwd()}
server.sendall(json.dumps(asked).encode() + b"\\n")
code = int(server.recv(9))
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


class PythonWithTorch:
    """``command`` runs a script as Python would, in a fork of one process that has torch: in tenths of a second."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVES, str(folder / "serves")],
            env={**environment(), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.process.stdout.readline()
        self.command = [sys.executable, "-I", "-c", ASKS, str(folder / "serves")]

    def close(self) -> None:
        # Forks of it that still run have its output, too: nothing waits for its end.
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def watched(self, path: Path, *words: str, **variables: str) -> Training:
        """What is said of a script's only training. What it prints is in the file ``printed`` beside it."""
        env = environment(PYTEST_FP8_WATCH_FOLDER=str(path.parent), KINETO_LOG_LEVEL="6", **variables)
        with (path.parent / "printed").open("w") as printed:
            subprocess.run([*self.command, path, *words], env=env, stdout=printed, check=True)
        (training,) = [judge(evidence) for evidence in evidence_in(path.parent)]
        return training
