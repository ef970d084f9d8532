"""Private folders for the checkpoints of arms, kept while their arm is."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

Key = tuple[str, str]
"""An arm, and what it saves there. A reference shared by cases that save different things has several folders, so that
none of them overwrites what another case still reads."""


class Folders:
    """They are deleted with this object at the latest."""

    def __init__(self) -> None:
        self._made: dict[Key, tempfile.TemporaryDirectory[str]] = {}

    def of(self, key: Key) -> Path:
        if key not in self._made:
            self._made[key] = tempfile.TemporaryDirectory(prefix="fp8-checkpoints-")
        return Path(self._made[key].name)

    def keep(self, arms: Collection[str]) -> list[Key]:
        """Delete the folders of all other arms; gives what they were."""
        gone = [key for key in self._made if key[0] not in arms]
        for key in gone:
            self._made.pop(key).cleanup()
        return gone
