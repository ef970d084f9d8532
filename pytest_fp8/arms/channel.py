"""Requests to one arm and its answers, over its socket. Each has a number, and every read has an end.

Code of the user runs in the arm and can write to any file descriptor, fork, or end the process while a child of it
keeps the socket open. Whatever arrives is an answer, or an error that says what arrived instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MOST_BYTES = 2**30
"""Of one answer: what a user's own function gives back is the largest."""
READ_BYTES = 2**20
LOOK_SECONDS = 0.2
"""How often it is seen whether the process is still there."""
BEGINS = b'{"id": '
"""How each answer begins."""


class Unreadable(Exception):
    """What arrived is no answer to the last request."""


class Channel:
    """The socket of one arm, seen from pytest."""

    def __init__(self, connection: Connection, gone: Callable[[], bool]) -> None:
        """``gone``: whether the process has ended. Its children may keep the socket open."""
        self._connection, self._gone = connection, gone
        self._number = 0
        self._deadline = 0.0

    def ask(self, operation: str, arguments: dict[str, Any]) -> None:
        self._number += 1
        request = {"id": self._number, "operation": operation, "arguments": arguments}
        self._connection.send_bytes(json.dumps(request).encode())

    def answer(self, timeout: float) -> dict[str, Any]:
        """The answer to the last request, within ``timeout`` seconds. Raises :class:`TimeoutError`, :class:`EOFError`
        where no more can come, and :class:`Unreadable`."""
        self._deadline = time.monotonic() + timeout
        size = self._size()
        begin = self._read(min(size, len(BEGINS)))
        if begin != BEGINS:
            raise Unreadable(f"a message of {size} bytes that begins with {begin!r}")
        try:
            answer: dict[str, Any] = json.loads(begin + self._read(size - len(begin)))
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"a message of {size} bytes that is no JSON: {error}") from None
        if answer["id"] != self._number:
            raise Unreadable(f"an answer to request {answer['id']!r}, where request {self._number} is the last one")
        if not answer.keys() & {"result", "error", "bytes"}:
            raise Unreadable(f"an answer without a result: {begin!r}...")
        if "bytes" in answer:
            if (size := self._size()) != answer["bytes"]:
                raise Unreadable(f"{size} bytes where {answer['bytes']!r} were announced")
            answer["result"] = self._read(size)
        return answer

    def _size(self) -> int:
        """The length of the next message, in the format of :meth:`Connection.send_bytes`."""
        begin = self._read(4)
        (size,) = struct.unpack("!i", begin)
        if size == -1:
            (size,) = struct.unpack("!Q", self._read(8))
        if not 0 <= size <= MOST_BYTES:
            raise Unreadable(f"a message that begins with {begin!r} and would have {size} bytes: at most {MOST_BYTES}")
        return int(size)

    def _read(self, size: int) -> bytes:
        # Not by recv_bytes(): each of its reads allocates all that is still to come, and nothing ends them.
        data = bytearray()
        while len(data) < size:
            self._wait()
            part = b""
            with contextlib.suppress(ConnectionResetError):
                part = os.read(self._connection.fileno(), min(READ_BYTES, size - len(data)))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _wait(self) -> None:
        while not self._connection.poll(max(0.0, min(LOOK_SECONDS, self._deadline - time.monotonic()))):
            if self._gone() and not self._connection.poll(0):
                raise EOFError
            if time.monotonic() >= self._deadline:
                raise TimeoutError
