"""What an arm tells of an error: lines of its traceback, cause and next step."""

from __future__ import annotations

import os
import re
import shutil
import sys
import traceback

from pytest_fp8.codes import Code, R
from pytest_fp8.said import said
from pytest_fp8.source_text import OURS, is_library_file

LAST = 3
"""Innermost frames that are always shown."""
USERS = 2
"""Innermost frames of the user's own code that are shown as well."""
SHOWN = 2500
"""Characters of a trace."""


def trace_of(error: BaseException) -> str:
    """The last frames of the error, before them the user's innermost frames, and the exception. Where there are any of
    the user's, this package's are left out: what calls the user's code, and what a followed layer's call goes through.
    Else the innermost of this package's says which line asked a library for what it raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [index for index, frame in enumerate(frames) if is_users(frame.filename)]
    ours = [index for index, frame in enumerate(frames) if frame.filename.startswith(OURS)]
    last = range(max(0, len(frames) - LAST), len(frames))
    chosen = sorted({*last, *users[-USERS:]} - {*ours} if users else {*last, *ours[-1:]})
    lines, before = [], None
    for index in chosen:
        if before is not None and index > before + 1:
            lines.append("  ...\n")
        lines += traceback.format_list([frames[index]])
        before = index
    exception = "".join(traceback.format_exception_only(error))
    return "".join(lines)[-SHOWN:] + exception[: SHOWN // 3]


def telling_line(error: BaseException) -> str:
    """The innermost line of the user's own code, as ``File "...", line 9, in forward`` with its text; or an empty
    string."""
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return traceback.format_list(users[-1:])[0].strip() if users else ""


def is_users(filename: str) -> bool:
    """Whether a file is the user's: not a library's, not Python's own, and not this package's."""
    return not filename.startswith("<") and not is_library_file(filename)


# -- what is known of errors ------------------------------------------------------------------------------------------


def known_cause(error: BaseException) -> tuple[Code, str, str]:
    """Code, cause and next step: the error's own, or of the first entry of ``said.toml`` that fits. The two are empty
    where there is nothing to say."""
    code, cause, next_step = _said(error)
    return (
        getattr(error, "fp8_code", None) or code,
        getattr(error, "fp8_cause", "") or cause,
        getattr(error, "fp8_next", "") or next_step,
    )


def _said(error: BaseException) -> tuple[Code, str, str]:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{frames[-1].filename} {frames[-1].name}" if frames else ""
    for known in said()["known"]:
        found = re.search(known["says"], str(error))
        here = known.get("loaded", "torch") in sys.modules and re.search(known.get("at", ""), at)
        if found and known.get("kind", "BaseException") in kinds and here:
            facts = found.groupdict() | _facts(error)
            return R[known["code"]], known["cause"].format(**facts), known["next"].format(**facts)
    return R.ARM_RAISED, "", ""


def _facts(error: BaseException) -> dict[str, str]:
    """What an entry may say, in braces, of the arm's surroundings."""
    into, needed = getattr(error, "fp8_checkpoint", ("", 0))
    # Not tempfile.gettempdir(), which names another folder where this one is full. The folder that pytest's process
    # has, without the session's own in it, which goes at its end.
    temporary = re.sub(r"/fp8-[^/]+(/.*)?$", "", into or os.environ.get("TMPDIR") or "/tmp") or "/"
    free = shutil.disk_usage(temporary).free / 2**20 if os.path.isdir(temporary) else 0.0
    room = f"{free:.1f} MB are free in {temporary}"
    if needed:
        room = f"one checkpoint of this model takes {needed / 2**20:.1f} MB, and {room}"
    # Not os.getcwd(), which raises where the folder is gone.
    return {"folder": os.readlink("/proc/self/cwd"), "python": sys.executable, "temporary": temporary, "room": room}
