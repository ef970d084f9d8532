"""Where baselines are read from: a folder, or the folder as it was at a git revision."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path

from pytest_fp8.baselines.strict import Unsound, decoded, quoted, read_regular
from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError
from pytest_fp8.git import GitError, agrees, commit_named, committed


class Folder:
    """Files by their path below the folder of baselines, in the working tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def label(self, name: Path) -> str:
        """The file as a message calls it."""
        return str(self.folder / name)

    def text(self, name: Path) -> str | None:
        """What is in the file; ``None`` where there is none. Raises :class:`Unsound`."""
        try:
            return read_regular(self.folder / name)
        except FileNotFoundError:
            return None

    def names(self) -> list[Path]:
        """All ``*.json`` below the folder, without those whose name begins with ``_`` or ``.``, sorted."""
        found = (path.relative_to(self.folder) for path in self.folder.rglob("*.json"))
        return sorted(path for path in found if is_baseline(path.name))


Source = Folder
"""Where baselines are read from: either class."""


class Revision(Folder):
    """A folder as it was at a git revision: a commit, branch or tag. Everything is read at the first question.

    Raises :class:`BaselineError` where the revision or the folder in it does not exist.
    """

    def __init__(self, folder: Path, revision: str) -> None:
        super().__init__(folder)
        self.revision = revision

    def label(self, name: Path) -> str:
        return f"{self.revision}:{self.folder.name}/{name}"

    def text(self, name: Path) -> str | None:
        data = self._files.get(name)
        if isinstance(data, str):
            raise Unsound(data)
        return decoded(data) if data is not None else None

    def names(self) -> list[Path]:
        return sorted(name for name in self._files if is_baseline(name.name))

    @cached_property
    def above(self) -> Path:
        """The folder; where it is gone, the first one above that is there: git removes those that it leaves empty."""
        folder = self.folder.absolute()
        return next(one for one in (folder, *folder.parents) if one.is_dir())

    @cached_property
    def _files(self) -> Mapping[Path, bytes | str]:
        """The content of each file, or why it has none."""
        folder, where = self.folder.absolute(), self.above
        prefix = "" if where == folder else f"{folder.relative_to(where).as_posix()}/"
        below = f"./{prefix}"
        try:
            found = committed(where, commit_named(where, self.revision), below)
        except GitError as error:
            raise self._error(str(error), error.next_step) from error
        return {Path(name.removeprefix(prefix)): data for name, data in found.items() if name.endswith(".json")}

    def _error(self, seen: str, next_step: str = "") -> BaselineError:
        return BaselineError(
            B.NO_REVISION,
            f"baselines of {self.folder} at git revision {self.revision!r} cannot be read",
            expected="a folder in a git repository, and a commit, branch or tag of it that has baselines",
            seen=seen,
            # What git itself says to do has its cause in what it says.
            cause="" if next_step else "a revision from before the folder, or of another repository",
            next_step=next_step or f"git log --oneline -- {self.folder}",
        )


@lru_cache(maxsize=4)
def source_of(folder: Path, revision: str = "") -> Source:
    """Where this session's baselines are: the folder as it is at the commit ``revision`` where its repository has that
    commit and the commit has baselines there; else the folder itself. Read once. Raises :class:`BaselineError`."""
    there = Revision(folder, revision)
    known = bool(revision) and agrees(there.above, "cat-file", "-e", f"{revision}^{{commit}}")
    return there if known and there.names() else Folder(folder)


def is_baseline(name: str) -> bool:
    """Whether a file of this name holds a baseline: those of notes (``_``) and hidden ones do not."""
    return name.endswith(".json") and not name.startswith(("_", "."))


def shown(name: Path) -> Path:
    """A path below the folder as a message may print it: a stranger's name may hold control characters."""
    return Path(*(part if part.isprintable() else quoted(part) for part in name.parts))
