"""How a report names files: those of a project without the folders of the machine it is on."""

from __future__ import annotations

from pathlib import Path


def below(path: Path, folder: Path) -> str:
    """A path below ``folder`` relative to it; any other as it is."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
