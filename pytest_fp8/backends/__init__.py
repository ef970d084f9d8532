"""The ways to switch FP8 on."""

from __future__ import annotations

from typing import cast

from pytest_fp8.backends.base import Backend
from pytest_fp8.recipes import backend_type


def backend(name: str) -> Backend:
    """The backend of that name; its library is imported only when one of its methods needs it. Raises ``KeyError``."""
    return cast(Backend, backend_type(name)())
