"""The environment variables of an arm's process."""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib.util
import os
import re
import sys
import tempfile
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fp8.arms.left_behind import MARK
from pytest_fp8.arms.scratch import session_folder, sockets_fit

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment

FEW_CORES = 4
"""With more cores than this, threads that spin while they wait take nothing from two arms."""


def arm_env(backend: str, folder: Path, environment: ArmEnvironment | None = None) -> dict[str, str]:
    """The variables of an arm of this backend. ``folder``: the arm's own, for its temporary files.

    ``environment``: another interpreter or another checkout; without it the arm runs as this process does.
    """
    if environment is None:
        env = _own_env()
    else:
        from pytest_fp8.arms.environment import instrument

        env = _other_env(environment, instrument(folder))
    folders = {**_bytecode_in(session_folder()), **_temporary_files(backend, folder)}
    # CUDA by itself counts the fastest GPU first. An arm must run on the GPU that NVML, which counts by bus, described.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"HF_HUB_DISABLE_TELEMETRY": "1", **env, **folders, **order, MARK: str(folder)}


def _own_env() -> dict[str, str]:
    """This process's variables and import path, with torch's own cuDNN put first.

    Transformer Engine looks for a system cuDNN before the one that came with torch. Where both exist, torch may load a
    version that it was not built for; then it silently picks another attention kernel, or loading fails.
    ``CUDNN_HOME`` and ``LD_LIBRARY_PATH`` name torch's own in every arm, since torch works with no other.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if len(os.sched_getaffinity(0)) <= FEW_CORES:
        # Threads that spin while they wait take the cores from the threads they wait for, once anything else runs
        # beside them: 1.3 s became 41 s on two busy cores.
        env.setdefault("OMP_WAIT_POLICY", "passive")
    spec = None
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec("nvidia.cudnn")
    if spec is not None and spec.submodule_search_locations:
        _point_at_cudnn(env, next(iter(spec.submodule_search_locations)))
    return env


def _other_env(chosen: ArmEnvironment, instrument: str) -> dict[str, str]:
    """The same for an arm of another interpreter or checkout: its own import path, its own cuDNN."""
    env = {**os.environ, **chosen.env(instrument)}
    if chosen.cudnn:
        _point_at_cudnn(env, chosen.cudnn)
    return env


def _point_at_cudnn(env: dict[str, str], home: str) -> None:
    env["CUDNN_HOME"] = home
    # The loader finds cuDNN's parts (libcudnn_graph, ...). It does not read CUDNN_HOME.
    paths = [str(Path(home) / "lib"), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(paths)


def _bytecode_in(folder: Path) -> dict[str, str]:
    """Variables with which arms keep the bytecode of libraries where Python keeps none: beside them, or below this
    folder where that cannot be written.

    Many container images set ``PYTHONDONTWRITEBYTECODE``, and some installers compile nothing. Then each arm compiles
    what it imports: 12.4 s instead of 5.1 s for torch, transformers and torchao on two cores.
    """
    torch = _without_bytecode()
    if torch is None or "PYTHONPYCACHEPREFIX" in os.environ:
        return {}
    # An empty value is none.
    kept = {} if os.access(torch, os.W_OK) else {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    return {"PYTHONDONTWRITEBYTECODE": "", **kept}


@functools.cache
def _without_bytecode() -> Path | None:
    """torch's folder, where Python has no bytecode of it."""
    with contextlib.suppress(ModuleNotFoundError, ValueError, NotImplementedError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None and not os.path.exists(cache_from_source(spec.origin)):
            return Path(spec.origin).parent
    return None


def _temporary_files(backend: str, folder: Path) -> dict[str, str]:
    """Variables that make the arm's temporary folder its own one, so that nothing of a killed arm stays behind.

    A library that patches others writes more: Unsloth writes quantized copies of weights to the temporary folder, for
    whoever comes next, and generated code to the current one.
    """
    from pytest_fp8.recipes import backend_type

    alone = backend_type(backend).brings_model
    if not alone and not sockets_fit(folder):
        # Below a folder with a long name a user's DataLoader could not have the sockets that it has without us.
        return {}
    # Compiled code is kept across arms: building it again takes half a minute.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    env = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)), "TMPDIR": str(folder)}
    return {**env, **({"UNSLOTH_COMPILE_LOCATION": str(folder / "compiled")} if alone else {})}


def _user() -> str:
    """As torch names its own folder."""
    with contextlib.suppress(KeyError, OSError):
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return f"uid_{os.getuid()}"
