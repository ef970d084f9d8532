"""This process's environment variables, other ones for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def variables(changed: Mapping[str, str | None]) -> Iterator[None]:
    """These are set, or unset where it says ``None``, while the block runs. What else it sets stays."""
    before = {name: os.environ.get(name) for name in changed}
    _set(changed)
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def environment(env: Mapping[str, str]) -> Iterator[None]:
    """These are all that there are while the block runs. What else it sets goes with them."""
    before = dict(os.environ)
    _be(env)
    try:
        yield
    finally:
        _be(before)


def _set(wanted: Mapping[str, str | None]) -> None:
    for name, value in wanted.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _be(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
