"""The ways to switch FP8 on."""

from __future__ import annotations

from typing import cast

from pytest_fp8.backends.base import Backend
from pytest_fp8.recipes import backend_type
from pytest_fp8.said import Told

_failed: dict[str, Exception] = {}
"""Backend -> why its library could not be imported."""


class LibraryError(Told, ImportError):
    """A backend's library is there and cannot be imported."""


def backend(name: str) -> Backend:
    """The backend of that name; its library is imported only when one of its methods needs it. Raises ``KeyError``."""
    return cast(Backend, backend_type(name)())


def import_library(name: str) -> None:
    """Import a backend's library. Raises :class:`LibraryError` with the error of the first try: half of a library stays
    behind, and a second import tells of that alone."""
    try:
        if name not in _failed:
            backend(name).import_library()
            return
    except Exception as error:
        _failed[name] = error
    first = _failed[name]
    raise LibraryError(
        f"the library of backend {name!r} cannot be imported: {type(first).__name__}: {first}"
    ) from first
