"""Which code is the project's own, and of which side's: what an arm of another commit must not import from here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pytest_fp8.said import Told

NOT_FROM = "PYTEST_FP8_NOT_FROM"
"""The variable that gives an arm of another commit the repository as it is here, and the checkout that is its own."""


class OtherSideError(Told, ImportError):
    """An arm of another commit has imported code from the project as it is here."""


def own_code(path: str | Path, top: Path) -> bool:
    """Whether a file or folder is the project's own code: it lies in the repository, and in no virtual environment
    there."""
    real = Path(path).resolve()
    if not real.is_relative_to(top) or {"site-packages", "dist-packages"} & {*real.relative_to(top).parts}:
        return False
    inside = [Path(prefix).resolve() for prefix in {sys.prefix, sys.base_prefix}]
    return not any(prefix.is_relative_to(top) and prefix != top and real.is_relative_to(prefix) for prefix in inside)


def require_own_code() -> None:
    """In an arm, once it has trained. Raises :class:`OtherSideError` for a module that this commit has as well, or that
    git knows here: under an editable install base would import what has been renamed, moved or added since."""
    here, _, mine = os.environ.get(NOT_FROM, "").partition(os.pathsep)
    if not here:
        return
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # This package measures both sides, wherever it lies. torch has modules whose file has no folder.
        if not isinstance(file, str) or not os.path.isabs(file) or name.partition(".")[0] == "pytest_fp8":
            continue
        real = Path(file).resolve()
        # Code that a compiler has written to a cache in the project is no commit's.
        if own_code(real, Path(here)) and (Path(mine, real.relative_to(here)).is_file() or _tracked(real)):
            raise OtherSideError(f"{name} came from {file}, which is not of this commit")


def _tracked(file: Path) -> bool:
    """Whether git tracks it, in the repository or in a submodule."""
    from pytest_fp8.git import agrees

    return agrees(file.parent, "ls-files", "--error-unmatch", "--", file.name)
