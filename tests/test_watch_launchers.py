"""``pytest-fp8 watch`` under the ways in which people start a training, and what it must leave as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.watching import HEALTHY, environment, script, watch
from pytest_fp8.codes import W

pytestmark = pytest.mark.slow

RANKS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Model().bfloat16())
train(model, torch.optim.AdamW(model.parameters()))
dist.destroy_process_group()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]


def launch(launcher, path):
    """The command that starts a script."""
    python = sys.executable
    if launcher == "shell":
        start = path.with_suffix(".sh")
        start.write_text(f'#!/bin/sh\nset -e\ncd "{path.parent}"\nexec "{python}" {path.name} --lr 1\n')
        return ["sh", start]
    return {
        "script": [python, path],
        "module": [python, "-m", path.stem],
        "accelerate": [python, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", path],
        "deepspeed": [python, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--no_local_rank", path],
        "uv run": ["uv", "run", "--no-project", "--offline", "--python", python, path],
        "torchrun": [python, *TORCHRUN, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", path],
    }[launcher]


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize("launcher", ["script", "torchrun", "accelerate", "module", "shell", "deepspeed", "uv run"])
def test_a_launcher(tmp_path, launcher):
    if launcher == "deepspeed":
        pytest.importorskip("deepspeed")
    if launcher == "uv run" and shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    path = script(tmp_path, RANKS if launcher == "torchrun" else HEALTHY)
    command, options = launch(launcher, path), ("--expect", "fp8", "--share", "0.7")
    done, told = watch(tmp_path, *command, options=options, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    ranks = 2 if launcher == "torchrun" else 1
    # Ranks may write into each other's lines.
    assert done.stdout.count("losses") == ranks
    (training,) = told["trainings"]
    assert training["fp8_share"] == pytest.approx(32 / 35)
    assert [rank["rank"] for rank in training["ranks"]] == list(range(ranks))
    assert training["notes"] == []


def test_the_exit_code_and_the_output_are_the_script_s(tmp_path):
    end = "import sys\nprint('to stderr', file=sys.stderr)\nsys.excepthook = lambda *_: print('my hook')\n"
    path = script(tmp_path, HEALTHY + end + "raise SystemExit(7)\n")
    done, told = watch(tmp_path, sys.executable, path, options=("--expect", "fp8"))
    alone = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout) == (7, alone.stdout)
    assert done.stderr.startswith(alone.stderr), "the report comes after the script's own"
    assert (told["script_exit_code"], told["trainings"][0]["verdict"]) == (7, "ON")


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize("form", ["module", "package"])
def test_the_sitecustomize_that_is_hidden_runs(tmp_path, form):
    (tmp_path / "site").mkdir()
    file = tmp_path / "site" / ("sitecustomize.py" if form == "module" else "sitecustomize/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("import builtins\nbuiltins.customized = __name__\n")
    path = tmp_path / "plain.py"
    path.write_text(
        "import sitecustomize, sys\nprint(customized, 'torch' in sys.modules, 'pytest_fp8' in sys.modules)\n"
    )
    done, told = watch(tmp_path, sys.executable, path, PYTHONPATH=f"{tmp_path / 'site'}:{Path(__file__).parents[1]}")
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


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize(
    ("arguments", "variables", "text", "code"),
    [
        (["-I"], {}, HEALTHY, W.NO_TRAINING),
        ([], {"FP8_WATCH": "0"}, HEALTHY, W.NO_TRAINING),
        (
            [],
            {},
            "model = Model().bfloat16()\ntrain(model, torch.optim.AdamW(model.parameters()), steps=4)\n",
            W.TOO_SHORT,
        ),
        ([], {}, "profile = torch.profiler.profile()\n" + HEALTHY, W.PROFILES_ITSELF),
        ([], {}, HEALTHY + "import os; os._exit(0)\n", None),
        ([], {}, HEALTHY.replace("()))", "()), steps=5)") + "import os; os._exit(0)\n", W.NOT_OBSERVED),
    ],
    ids=["python -I", "switched off", "too short", "profiles itself", "_exit after", "_exit before"],
)
def test_what_cannot_be_seen_is_unknown(tmp_path, arguments, variables, text, code):
    done, told = watch(
        tmp_path, sys.executable, *arguments, script(tmp_path, text), options=("--expect", "fp8"), **variables
    )
    assert done.returncode == (2 if code else 0), done.stderr
    assert (code or "FP8 ON") in done.stderr
    assert "OFF" not in done.stderr
    assert "losses [" in done.stdout or "_exit" in text
    assert all(training["verdict"] == ("UNKNOWN" if code else "ON") for training in told["trainings"])


@pytest.mark.parametrize("version", ["2.1.0", "2.11.0"])
def test_a_torch_that_is_too_old_is_named(tmp_path, version):
    """A stand-in for torch: what is not supported is not even called."""
    home = tmp_path / "torch" / "optim"
    home.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").write_text(f"__version__ = {version!r}\nfrom torch.optim import optimizer\n")
    (home / "__init__.py").write_text("")
    (home / "optimizer.py").write_text("def register_optimizer_step_post_hook(hook):\n    print('registered')\n")
    (tmp_path / "old.py").write_text("import torch\n")
    done, told = watch(tmp_path, sys.executable, tmp_path / "old.py")
    supported = version == "2.11.0"
    assert done.stdout == ("registered\n" if supported else "")
    assert [training["code"] for training in told["trainings"]] == ([] if supported else [W.UNSUPPORTED]), done.stderr


def test_forks_and_workers_stay_silent(tmp_path):
    text = """
import os
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(index)
loader = torch.utils.data.DataLoader(Data(), num_workers=1)
model = Model().bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer, steps=4)
list(loader)
if os.fork() == 0:
    train(model, optimizer, steps=12)
    os._exit(0)
os.wait()
train(model, optimizer, steps=8)
"""
    done, told = watch(tmp_path, sys.executable, script(tmp_path, text))
    assert len(told["trainings"]) == 1, done.stderr
    assert told["trainings"][0]["verdict"] == "ON", done.stderr


def test_usage(capsys):
    from pytest_fp8.cli import main

    assert main(["watch", "--expect", "fp8", "--"]) == 2
    assert main(["watch", "--share", "70", "--", "true"]) == 2
    assert main(["watch", "--json", "no/such/folder.json", "--", "true"]) == 2
    assert main(["watch", "--", "no-such-command-at-all"]) == 2
    assert "R08" in capsys.readouterr().err


def test_the_json_is_as_its_schema_says(tmp_path):
    _, told = watch(tmp_path, sys.executable, script(tmp_path, HEALTHY))
    schema = json.loads((Path(__file__).parents[1] / "docs/watch.schema.json").read_text())
    assert set(told) == set(schema["properties"])
    assert os.path.exists(tmp_path / "watched.json")
