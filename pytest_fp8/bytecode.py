"""Keeps the bytecode that an arm compiles in a folder of the session, where Python keeps none beside the libraries."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import CodeType
from typing import Any

from pytest_fp8.environ import variables

FOLDER = "PYTEST_FP8_BYTECODE"
"""The variable that names the folder; unset where Python keeps bytecode itself."""


def keep_bytecode() -> None:
    """From here on this process's imports read bytecode beside the source or in the folder, and write it there alone.

    ``sys.pycache_prefix`` would write there, too, but read no more beside the source: all of Python's own library, and
    each package that was installed with its bytecode, would be compiled anew. Seen on H100 machines with four arms at
    once: imports took 24 to 36 s, where they take 11 to 16 s without.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    KeepingLoader.folder = folder
    loaders = (
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (KeepingLoader, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )
    sys.path_hooks.insert(0, FileFinder.path_hook(*loaders))
    sys.path_importer_cache.clear()


@contextlib.contextmanager
def kept_by_children() -> Iterator[None]:
    """Python processes that are started meanwhile read the folder's bytecode, and write what they miss. They read none
    beside the source, so that Python's own library is compiled once more, by the first ones. torch's processes for
    compilation then have their libraries in 2.3 s instead of 12 s, on two cores.
    """
    folder = os.environ.get(FOLDER)
    with variables({"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": None} if folder else {}):
        yield


class KeepingLoader(SourceFileLoader):
    """Python's own loader of source files, with another folder for the bytecode that is not beside them."""

    folder = ""

    def get_code(self, fullname: str) -> CodeType | None:
        """Nothing is imported meanwhile: the module is executed later."""
        before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
        try:
            return super().get_code(fullname)
        finally:
            sys.dont_write_bytecode = before

    def get_data(self, path: str) -> bytes:
        """The source; or bytecode, from the folder where there is none beside it."""
        if not path.endswith(tuple(BYTECODE_SUFFIXES)):
            return super().get_data(path)
        try:
            return super().get_data(path)
        except OSError:
            return super().get_data(self._kept(path))

    def set_data(self, path: Any, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(self._kept(path), data, _mode=_mode)

    def _kept(self, path: str) -> str:
        # Where sys.pycache_prefix has it: no folder __pycache__.
        beside, name = os.path.split(os.path.abspath(path))
        return os.path.join(self.folder, os.path.dirname(beside).lstrip(os.sep), name)
