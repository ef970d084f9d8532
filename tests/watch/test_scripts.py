"""``pytest-fp8 watch`` on scripts: the ways in which people start a training, what it must leave as it was, and what it
says of scripts that lose FP8."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.watching import OWN_FP8, environment
from pytest_fp8.codes import W
from pytest_fp8.watch import FOLDER
from pytest_fp8.watch.command import answer, evidence_in
from pytest_fp8.watch.judge import judge
from pytest_fp8.watch.report import groups, plain, report

pytestmark = pytest.mark.slow

HEALTHY = "model = Model().bfloat16()\ntrain(model, torch.optim.AdamW(model.parameters()))\n"
RANKS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Model().bfloat16())
train(model, torch.optim.AdamW(model.parameters()))
dist.destroy_process_group()
"""


def script(folder, text):
    """A script that begins with :data:`OWN_FP8`."""
    path = folder / "train.py"
    path.write_text(OWN_FP8 + text)
    return path


def watch(folder, *command, options=(), **more):
    """(the ended process, its JSON or ``None``) of ``pytest-fp8 watch`` on a command of Python's arguments."""
    file = folder / "watched.json"
    line = [sys.executable, "-m", "pytest_fp8.cli", "watch", *options, "--json", str(file), "--", *map(str, command)]
    done = subprocess.run(
        line, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=300, check=False
    )
    return done, json.loads(file.read_text()) if file.exists() else None


def by_shell(path):
    start = path.with_suffix(".sh")
    start.write_text(f'#!/bin/sh\nset -e\ncd "{path.parent}"\nexec "{sys.executable}" {path.name} --lr 1\n')
    return ["sh", start]


def by_python(*words):
    return lambda path: [sys.executable, *words, path]


LAUNCHERS = {
    "torchrun": by_python(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
    ),
    "accelerate": by_python("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"),
    "deepspeed": by_python("-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--no_local_rank"),
    "module": lambda path: [sys.executable, "-m", path.stem],
    "shell": by_shell,
    "uv": lambda path: ["uv", "run", "--no-project", "--offline", "--python", sys.executable, path],
}
"""Ways to start a script -> the command."""


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher(tmp_path, launcher):
    if launcher == "deepspeed":
        pytest.importorskip("deepspeed")
    path = script(tmp_path, RANKS if launcher == "torchrun" else HEALTHY)
    command, options = LAUNCHERS[launcher](path), ("--expect", "fp8", "--share", "0.7")
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done, told = watch(tmp_path, *command, options=options, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    ranks = 2 if launcher == "torchrun" else 1
    # Ranks may write into each other's lines.
    assert done.stdout.count("losses") == ranks
    (training,) = told["trainings"]
    assert training["fp8_share"] == pytest.approx(32 / 35)
    assert [rank["rank"] for rank in training["ranks"]] == list(range(ranks))
    assert training["notes"] == []


def test_ranks_are_one_training(tmp_path, python_with_torch):
    """As a launcher starts them, without its own imports."""
    path = script(tmp_path, RANKS)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, FOLDER: str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [*python_with_torch.command, path],
            env=environment(**shared, RANK=str(rank)),
            stdout=(tmp_path / f"printed {rank}").open("w"),
        )
        for rank in range(2)
    ]
    assert [each.wait(300) for each in ranks] == [0, 0]
    (training,) = plain(groups([judge(evidence) for evidence in evidence_in(tmp_path)]), ["python"], 0)["trainings"]
    assert [rank["rank"] for rank in training["ranks"]] == [0, 1]
    assert (training["fp8_share"], training["notes"]) == (pytest.approx(32 / 35), [])


# -- one run of a script as people write them, judged by several tests ------------------------------------------------


WHOLE = """
import os, sys


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index)


model = Model().bfloat16()
list(torch.utils.data.DataLoader(Data(), num_workers=1))
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer, steps=4)
if os.fork() == 0:
    train(model, optimizer, steps=12)
    os._exit(0)
os.wait()
train(model, optimizer)
print("to stderr", file=sys.stderr)
sys.excepthook = lambda *_: print("my hook")
raise SystemExit(7)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the ended process, its JSON)."""
    folder = tmp_path_factory.mktemp("whole")
    return watch(folder, sys.executable, script(folder, WHOLE), options=("--expect", "fp8"))


def test_the_exit_code_and_the_output_are_the_script_s(run, capsys):
    done, told = run
    lines = done.stdout.splitlines()
    names: dict = {}
    exec(OWN_FP8, names)
    model = names["Model"]().bfloat16()
    optimizer = names["torch"].optim.AdamW(model.parameters())
    for steps in (4, 8):
        names["train"](model, optimizer, steps=steps)
    assert [lines[0], lines[-1]] == capsys.readouterr().out.splitlines(), "as nobody watched"
    assert (done.returncode, told["script_exit_code"]) == (7, 7)
    assert done.stderr.startswith("to stderr\n"), "the report comes after the script's own"


def test_forks_and_workers_stay_silent_and_a_healthy_script_has_no_finding(run):
    done, told = run
    (training,) = told["trainings"]
    assert (training["verdict"], training["notes"]) == ("ON", []), done.stderr
    assert training["roles"] == pytest.approx({"fprop": 16 / 19, "dgrad": 16 / 19, "wgrad": 16 / 19}, abs=0.2)
    assert training["rows"] == 96
    assert [(each["layers"], each["products"]) for each in training["classes"]] == [
        (["blocks.0.up", "blocks.1.up"], {role: {"fp8": 2} for role in ("fprop", "dgrad", "wgrad")}),
        (["blocks.0.down", "blocks.1.down"], {role: {"fp8": 2} for role in ("fprop", "dgrad", "wgrad")}),
        (["lm_head"], {role: {"bfloat16": 1} for role in ("fprop", "dgrad", "wgrad")}),
    ]


def test_the_page_says_each_field_of_the_json(run):
    page, (training,) = (Path(__file__).parents[2] / "docs/watch.md").read_text(), run[1]["trainings"]
    names = [*run[1], *training, *training["classes"][0], *training["ranks"][0]]
    assert [name for name in names if f"`{name}`" not in page.partition("### JSON")[2]] == []


# -- what is left alone, and what cannot be seen ----------------------------------------------------------------------


def test_the_sitecustomize_that_is_hidden_runs(tmp_path):
    """Also where it is a package."""
    (tmp_path / "site/sitecustomize").mkdir(parents=True)
    (tmp_path / "site/sitecustomize/__init__.py").write_text("import builtins\nbuiltins.customized = __name__\n")
    path = tmp_path / "plain.py"
    path.write_text(
        "import sitecustomize, sys\nprint(customized, 'torch' in sys.modules, 'pytest_fp8' in sys.modules)\n"
    )
    done, told = watch(tmp_path, sys.executable, path, PYTHONPATH=f"{tmp_path / 'site'}:{Path(__file__).parents[2]}")
    assert done.stdout == "sitecustomize False False\n", done.stderr
    assert told["trainings"] == []
    assert W.NO_TRAINING in done.stderr


def test_stop_ends_the_script_and_its_children(tmp_path):
    sleeper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    more = f"import subprocess, sys, time\nprint({sleeper}.pid, flush=True)\n"
    path = script(tmp_path, more + HEALTHY + "time.sleep(99)\n")
    done, told = watch(tmp_path, sys.executable, path, options=("--stop", "--expect", "fp8"))
    assert done.returncode == 0, done.stderr
    assert told["trainings"][0]["verdict"] == "ON"
    child = int(done.stdout.split()[0])
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


@pytest.mark.nightly
@pytest.mark.parametrize(("arguments", "variables"), [(["-I"], {}), ([], {"FP8_WATCH": "0"})])
def test_a_training_that_is_not_observed_is_unknown(tmp_path, arguments, variables):
    path = script(tmp_path, HEALTHY)
    done, told = watch(tmp_path, sys.executable, *arguments, path, options=("--expect", "fp8"), **variables)
    assert done.returncode == 2, done.stderr
    assert W.NO_TRAINING in done.stderr
    assert "OFF" not in done.stderr
    assert "losses [" in done.stdout
    assert told["trainings"] == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (HEALTHY.replace("()))", "()), steps=4)"), W.TOO_SHORT),
        ("profile = torch.profiler.profile()\n" + HEALTHY, W.PROFILES_ITSELF),
        (HEALTHY + "import os; os._exit(0)\n", None),
        (HEALTHY.replace("()))", "()), steps=5)") + "import os; os._exit(0)\n", W.NOT_OBSERVED),
    ],
    ids=["too short", "profiles itself", "_exit after", "_exit before"],
)
def test_what_cannot_be_seen_is_unknown(tmp_path, python_with_torch, text, code):
    training = python_with_torch.watched(script(tmp_path, text))
    assert (training.verdict, training.why and training.why.code) == ("UNKNOWN" if code else "ON", code)
    assert answer([training], 0.0) == (2 if code else 0)


@pytest.mark.parametrize("version", ["2.1.0", "2.11.0"])
def test_a_torch_that_is_too_old_is_named(tmp_path, version):
    """A stand-in for torch: what is not supported is not even called."""
    home = tmp_path / "torch" / "optim"
    home.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").write_text(f"__version__ = {version!r}\nfrom torch.optim import optimizer, sgd\n")
    (home / "__init__.py").write_text("")
    hook = "def register_optimizer_step_pre_hook(hook):\n    print('registered')\n"
    (home / "optimizer.py").write_text(f"{hook}class Optimizer:\n    pass\n")
    (home / "sgd.py").write_text("")
    (tmp_path / "old.py").write_text("import torch\n")
    done, told = watch(tmp_path, sys.executable, tmp_path / "old.py")
    supported = version == "2.11.0"
    assert done.stdout == ("registered\n" if supported else "")
    assert [training["code"] for training in told["trainings"]] == ([] if supported else [W.UNSUPPORTED]), done.stderr


def test_usage(capsys):
    from pytest_fp8.cli import main

    assert main(["watch", "--expect", "fp8", "--"]) == 2
    assert main(["watch", "--share", "70", "--", "true"]) == 2
    assert main(["watch", "--share", "0.7", "--", "true"]) == 2, "it asks nothing without --expect"
    assert main(["watch", "--json", "no/such/folder.json", "--", "true"]) == 2
    assert main(["watch", "--", "no-such-command-at-all"]) == 2
    assert "R08" in capsys.readouterr().err


# -- the ways in which FP8 gets lost, a script for each as a user would write it --------------------------------------


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
"""
TEACHER = """
import copy

model = Model(nn.Linear).bfloat16()
teacher = copy.deepcopy(model).requires_grad_(False)
for block in model.blocks:
    block.up, block.down = converted(block.up), converted(block.down)


def forward(ids):
    logits = model(ids)
    with torch.no_grad():
        logits += teacher(ids)
    return logits


train(model, torch.optim.AdamW(model.parameters()), forward=forward)
"""
DROPPED = """
class Dropped(Model):
    def forward(self, ids):
        return self.lm_head(self.blocks[2](self.blocks[1](self.blocks[0](self.embed(ids)))))


model = Dropped(nn.Linear).bfloat16()
model.blocks.extend(Block(nn.Linear).bfloat16() for _ in "ab")
for block in model.blocks[{first}:]:
    block.up, block.down = converted(block.up), converted(block.down)
"""
UNUSED = """
model = Model().bfloat16()
used = Model(nn.Linear).bfloat16()
train(used, torch.optim.AdamW(model.parameters()))
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
FAILURES = {
    "nothing read it": (PLAIN + RUN, "OFF", [W.NOTHING_READ_IT]),
    "a filter's typo": (PLAIN + CONVERT + TYPO + RUN, "ON", [W.LEFT_OUT]),
    "converted too late": (PLAIN + CONVERT + TOO_LATE, "ON", [W.CONVERTED_TOO_LATE]),
    "no wgrad": ("Float8Linear.roles = ('fprop', 'dgrad')\n" + HEALTHY, "ON", [W.FORWARD_ALONE]),
    "stored alone": (STORED + RUN, "OFF", [W.STORED_ONLY]),
    "stepped around": (AROUND + HEALTHY, "ON", [W.STEPPED_AROUND]),
    "recomputed": (RECOMPUTED, "ON", [W.RECOMPUTED_OTHERWISE]),
    "another model runs": (UNUSED, "OFF", [W.STEPPED_AROUND]),
    # Sound: a teacher of the same sizes, whose products have no backward pass; a layer that is dropped, of two.
    "a teacher": (CONVERT + TEACHER, "ON", []),
    "a dropped layer": (CONVERT + DROPPED.format(first=2) + RUN, "ON", [W.LEFT_OUT]),
    "no FP8 layer is left": (CONVERT + DROPPED.format(first=3) + RUN, "UNKNOWN", []),
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
