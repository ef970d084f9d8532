"""The option ``--fp8-weights``: local folders of weights for models of the suite."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse


def weights_of(given: Any) -> dict[str, str]:
    """Model name -> folder, from words ``MODEL=DIR``. Raises :class:`SettingsError`."""
    if not given:
        return {}
    from pytest_fp8.zoo.shapes import SHAPES

    entries = shlex.split(given) if isinstance(given, str) else list(given)
    folders: dict[str, str] = {}
    for entry in entries:
        model, separator, folder = entry.partition("=")
        if not separator or model not in SHAPES:
            refuse(
                R.BAD_VALUE,
                f"--fp8-weights {entry}",
                expected=f"MODEL=DIR with MODEL one of {', '.join(SHAPES)}",
                seen=entry,
            )
        if not (Path(folder) / "config.json").is_file():
            refuse(
                R.NO_WEIGHTS,
                f"--fp8-weights {entry}: that is not a folder of weights",
                expected="a folder with config.json and *.safetensors, as transformers saves them",
                seen=f"no {Path(folder) / 'config.json'}",
                cause="a misspelt path, or a folder that holds another format",
                next_step=f"ls {folder}",
            )
        folders[model] = str(Path(folder).resolve())
    return folders
