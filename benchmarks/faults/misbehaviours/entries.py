"""What an entry of the catalogue is, how one is added, and what several of them do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ANSWERS = "answers"
"""The arm answers as a sound one does."""
DIES, RAISES, HANGS, GARBLES = "died", "raised", "hung", "unreadable"
"""Kinds of :class:`pytest_fp8.errors.ArmError`."""


@dataclass(frozen=True)
class Misbehaviour:
    """One of the catalogue."""

    what: str
    do: Callable[[], Any]
    ends: str
    """How the request ends in which it happens: a kind of error, or :data:`ANSWERS`."""
    says: str = ""
    """What the error's message must hold: the cause."""
    later: str = ""
    """How the next request ends, where that is another error."""
    forks_only: bool = False
    """Whether it is about arms that are forks: the parent of another one is pytest itself."""
    leaves: bool = False
    """Whether the function gives the pid of a process, which must end with the arm."""


CATALOGUE: list[Misbehaviour] = []


def entry(what: str, ends: str, says: str = "", **more: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(do: Callable[[], Any]) -> Callable[[], Any]:
        CATALOGUE.append(Misbehaviour(what, do, ends, says, **more))
        return do

    return add


def simply(what: str, ends: str, says: str, do: Callable[[], Any], **more: Any) -> None:
    entry(what, ends, says, **more)(do)


def sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            pass
    return found


def to_sockets(data: bytes) -> None:
    for descriptor in sockets():
        os.write(descriptor, data)


def sleep_on() -> None:
    time.sleep(600)
