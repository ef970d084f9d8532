"""Private folders for the checkpoints of arms, kept while their arm is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pytest_fp8.arms.scratch import new_folder, remove

CHECKPOINTS = "checkpoints-"
Key = tuple[str, str]
"""An arm, and what it saves there. A reference shared by cases that save different things has several folders, so that
none of them overwrites what another case still reads."""


class Folders:
    def __init__(self) -> None:
        self._made: dict[Key, Path] = {}

    def of(self, key: Key) -> Path:
        if key not in self._made:
            self._made[key] = new_folder(CHECKPOINTS)
        return self._made[key]

    def keep(self, arms: Collection[str]) -> list[Key]:
        """Delete the folders of all other arms; gives what they were."""
        gone = [key for key in self._made if key[0] not in arms]
        for key in gone:
            remove(self._made.pop(key))
        return gone
