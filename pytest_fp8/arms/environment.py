"""The environment of an arm: its variables; another commit of the project, measured by this same pytest_fp8."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest_fp8
from pytest_fp8.arms.scratch import MARK, sockets_fit, temporary_folder
from pytest_fp8.codes import R
from pytest_fp8.errors import SettingsError
from pytest_fp8.git import GitError, agrees, commit_named, git
from pytest_fp8.own_code import NOT_FROM, own_code

CHECKOUT_SECONDS = 120
"""A large checkout takes its time."""
FEW_CORES = 4
"""With more cores than this, threads that spin while they wait take nothing from two arms."""


@dataclass(frozen=True)
class ArmEnvironment:
    """Where the imports of one side of a comparison come from."""

    name: str
    """``base`` or ``head``; part of the arm's key."""
    import_path: tuple[str, ...]
    """The folders of the project's own code, on this side: first on the import path."""
    own: tuple[str, ...] = ()
    """What of this process's import path is the project's own code, which an arm has by ``import_path`` alone."""
    not_from: str = ""
    """Of a side with a checkout: the top of the repository as it is here, from which an arm must import nothing, and
    that of the checkout; as :data:`pytest_fp8.own_code.NOT_FROM` tells them."""

    def env(self, instrument: str) -> dict[str, str]:
        """The variables that set the import path. ``instrument``: the folder from which pytest_fp8 is imported, so that
        the same code measures both arms."""
        libraries = [path for path in sys.path if path and path not in self.own]
        return {
            "PYTHONPATH": os.pathsep.join([*self.import_path, *libraries, instrument]),
            NOT_FROM: self.not_from,
            # Without it `python -m` puts the current folder first, and base's arm would run head's code.
            "PYTHONSAFEPATH": "1",
        }


def side_at(name: str, root: Path, project: Path) -> ArmEnvironment:
    """The side that has the files of ``root``, a checkout of the project or the ``project`` itself."""
    top = repository(project)
    own = [path for path in sys.path if path and own_code(path, top)]
    tree = os.path.normpath(root.resolve() / os.path.relpath(top, project.resolve()))
    not_from = os.pathsep.join([str(top), tree]) if root != project else ""
    return ArmEnvironment(name, tuple(_import_path(root, project, own)), tuple(own), not_from)


def cudnn() -> str:
    """The folder of the cuDNN that came with this interpreter's torch; empty where none did."""
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec("nvidia.cudnn")
        return next(iter(spec.submodule_search_locations or ()), "") if spec is not None else ""
    return ""


def import_folders(root: Path) -> list[Path]:
    """Where a project's packages lie: ``src`` if there is one, and the root."""
    return [path for path in (root / "src", root) if path.is_dir()]


def repository(project: Path) -> Path:
    """The top of the repository that a folder lies in; the folder itself where it lies in none."""
    with contextlib.suppress(GitError):
        return Path(git(project, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
    return project.resolve()


def _ignored(path: str, project: Path) -> bool:
    """Whether git ignores it, as what is generated or built: no commit has it, and each side takes what is here."""
    return agrees(project, "check-ignore", "--quiet", "--", os.path.abspath(path))


def _import_path(root: Path, project: Path, own: Iterable[str]) -> Iterator[str]:
    """The project's own folders on the import path as they are below ``root``: its packages', and each that is on this
    process's path, such as the tests' own. One that does not exist there is left out."""
    found = import_folders(root)
    for path in own:
        below = os.path.relpath(Path(path).resolve(), project.resolve())
        found.append(Path(path) if _ignored(path, project) else Path(os.path.normpath(root / below)))
    yield from dict.fromkeys(str(path) for path in found if path.exists())


def instrument(folder: Path) -> str:
    """A folder, below this one, that holds a link to this pytest_fp8 and nothing else."""
    made = folder / "instrument"
    made.mkdir()
    os.symlink(Path(str(pytest_fp8.__file__)).parent, made / "pytest_fp8", target_is_directory=True)
    return str(made)


def commit_of(revision: str, project: Path) -> str:
    """The commit that a revision names. Raises :class:`SettingsError`."""
    try:
        return commit_named(project, revision)
    except GitError as error:
        raise _not_checked_out(revision, error) from error


def _not_checked_out(revision: str, error: GitError) -> SettingsError:
    return SettingsError(
        R.NO_REVISION,
        f"git revision {revision!r} of this project cannot be checked out",
        expected="a commit, branch or tag of the repository in the current folder, and room for its files",
        seen=str(error)[-500:],
    )


@contextlib.contextmanager
def checkout(revision: str, project: Path) -> Iterator[Path]:
    """The project at a git revision: its files in a temporary folder, removed when the block is left. Nothing is
    written to the repository.

    Gives the folder in it that corresponds to ``project``, which may lie below the repository's root. Raises
    :class:`SettingsError`.
    """
    commit = commit_of(revision, project)
    with temporary_folder("checkout-") as folder:
        index, top = folder / "index", repository(project)
        try:
            below = git(project, "rev-parse", "--show-prefix").rstrip("\n")
            git(project, "read-tree", commit, index=index, seconds=CHECKOUT_SECONDS)
            written = "checkout-index", "--all", "--quiet", f"--prefix={folder / 'tree'}/"
            git(top, *written, index=index, seconds=CHECKOUT_SECONDS)
        except GitError as error:
            raise _not_checked_out(revision, error) from error
        yield folder / "tree" / below


def arm_env(backend: str, folder: Path, environment: ArmEnvironment | None = None) -> dict[str, str]:
    """The variables of an arm of this backend. ``folder``: the arm's own, for its temporary files.

    ``environment``: another checkout; without it the arm runs as this process does.

    Transformer Engine looks for a system cuDNN before the one that came with torch. Where both exist, torch may load a
    version that it was not built for; then it silently picks another attention kernel, or loading fails.
    ``CUDNN_HOME`` and ``LD_LIBRARY_PATH`` name torch's own in every arm, since torch works with no other.
    """
    env = {"HF_HUB_DISABLE_TELEMETRY": "1", **os.environ}
    if environment is None:
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    else:
        env |= environment.env(instrument(folder))
    if own := cudnn():
        env["CUDNN_HOME"] = own
        # The loader finds cuDNN's parts (libcudnn_graph, ...). It does not read CUDNN_HOME.
        paths = [str(Path(own) / "lib"), *filter(None, [env.get("LD_LIBRARY_PATH")])]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    if len(os.sched_getaffinity(0)) <= FEW_CORES:
        # Threads that spin while they wait take the cores from the threads they wait for, once anything else runs
        # beside them: 1.3 s became 41 s on two busy cores.
        env.setdefault("OMP_WAIT_POLICY", "passive")
    # CUDA by itself counts the fastest GPU first. An arm must run on the GPU that NVML, which counts by bus, described.
    return {**env, **_temporary_files(backend, folder), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", MARK: str(folder)}


def _temporary_files(backend: str, folder: Path) -> dict[str, str]:
    """Variables that make the arm's temporary folder its own one, so that nothing of a killed arm stays behind.

    A library that brings models writes more, such as quantized copies of weights, for whoever comes next.
    """
    from pytest_fp8.recipes import backend_type

    kind = backend_type(backend)
    if not kind.brings_model and not sockets_fit(folder):
        # Below a folder with a long name a user's DataLoader could not have the sockets that it has without us.
        return {}
    # Compiled code is kept across arms: building it again takes half a minute.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_fp8_{os.getuid()}"
    env = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)), "TMPDIR": str(folder)}
    return {**env, **{variable: str(folder / name) for variable, name in kind.writes_to.items()}}
