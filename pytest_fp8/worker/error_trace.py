"""Which lines of a traceback an arm's error shows: the last ones, and the user's own lines that led there."""

from __future__ import annotations

import re
import sysconfig
import traceback
from functools import cache
from pathlib import Path

LAST = 3
"""Innermost frames that are always shown."""
USERS = 2
"""Innermost frames of the user's own code that are shown as well."""
SHOWN = 2500
"""Characters of a trace."""

_UNLIKE = re.compile(
    r"same dtype|should be the same|expected .*(dtype|scalar type|to have type)|dtypes? .*(mismatch|match)",
    re.IGNORECASE,
)
MIXED_CAUSE = (
    "arms run the model and its floating-point batches in bfloat16, and an operation also got a tensor of another "
    "type: tensors made inside forward, such as a positional encoding or a mask, must take the input's dtype"
)
MIXED_NEXT = "make it in the input's dtype, torch.arange(n, device=x.device).to(x.dtype), or register it as a buffer"


def trace_of(error: BaseException) -> str:
    """The last frames of the error, before them the user's innermost frames, and the exception."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [index for index, frame in enumerate(frames) if is_users(frame.filename)]
    chosen = sorted({*range(max(0, len(frames) - LAST), len(frames)), *users[-USERS:]})
    lines, before = [], None
    for index in chosen:
        if before is not None and index > before + 1:
            lines.append("  ...\n")
        lines += traceback.format_list([frames[index]])
        before = index
    said = "".join(traceback.format_exception_only(error))
    return "".join(lines)[-SHOWN:] + said[: SHOWN // 3]


def users_line(error: BaseException) -> str:
    """The innermost line of the user's own code, as ``File "...", line 9, in forward`` with its text; or an empty
    string."""
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return traceback.format_list(users[-1:])[0].strip() if users else ""


def is_users(filename: str) -> bool:
    """Whether a file is the user's: not a library's, not Python's own, and not this package's."""
    if filename.startswith("<") or "site-packages" in filename or "dist-packages" in filename:
        return False
    return not filename.startswith(_others())


@cache
def _others() -> tuple[str, ...]:
    """Folders of code that is not the user's, also where it is not installed in site-packages."""
    import torch

    ours, torch_s = Path(__file__).parents[1], Path(torch.__file__).parent
    return tuple(f"{folder}/" for folder in (ours, torch_s, sysconfig.get_path("stdlib")))


def mixes_types(error: BaseException) -> bool:
    """Whether torch says that an operation was given bfloat16 and another type."""
    text = str(error)
    return isinstance(error, RuntimeError) and "bfloat16" in text.lower() and _UNLIKE.search(text) is not None
