"""Writing to a file descriptor: ``os.write`` may take a part of what it is given."""

from __future__ import annotations

import os


def write_all(descriptor: int, data: bytes) -> None:
    """Write ``data`` to the last byte. Raises ``OSError`` where that cannot be done."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
