"""What the user's code may raise in an arm and where it comes from: a cause and a next step, told by the exception."""

from __future__ import annotations

import os
import re
import shutil
import sys
import traceback

import torch
from torch.nn import Module

from pytest_fp8.codes import Code, R
from pytest_fp8.said import said
from pytest_fp8.worker.error_trace import is_users

SLIPS = (NameError, AttributeError, LookupError, ImportError, SystemExit)
"""What is wrong in any dtype and on any device."""


def known_cause(error: BaseException) -> tuple[Code, str, str]:
    """Code, cause and next step, which the error itself may have; the two are empty where there is nothing to say."""
    code, cause, next_step = _given_no_rows(error) or _said(error)
    return (
        getattr(error, "fp8_code", None) or code,
        getattr(error, "fp8_cause", "") or cause,
        getattr(error, "fp8_next", "") or next_step,
    )


def _said(error: BaseException) -> tuple[Code, str, str]:
    """The first entry of ``said.toml`` that fits; for others, where to mend a slip."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{frames[-1].filename} {frames[-1].name}" if frames else ""
    for known in said()["known"]:
        found = re.search(known["says"], str(error))
        here = known.get("loaded", "torch") in sys.modules and re.search(known.get("at", ""), at)
        if found and known.get("kind", "BaseException") in kinds and here:
            facts = found.groupdict() | _facts(error)
            return R[known["code"]], known["cause"].format(**facts), known["next"].format(**facts)
    return R.ARM_RAISED, "", _mend(error)


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


def _given_no_rows(error: BaseException) -> tuple[Code, str, str] | None:
    """What is said where a layer that multiplies raised it, and was given no rows of the right width."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [(frame, frame.f_locals["self"]) for frame in frames if isinstance(frame.f_locals.get("self"), Module)]
    for frame, layer in owners:
        code, weight = frame.f_code, dict(layer.named_parameters(recurse=False)).get("weight")
        # A library's layer: another forward may raise for reasons of its own.
        if code.co_name != "forward" or is_users(code.co_filename) or weight is None or weight.dim() != 2:
            continue
        for given in (frame.f_locals.get(name) for name in code.co_varnames[1 : code.co_argcount]):
            if isinstance(given, torch.Tensor) and not given.numel() and given.shape[-1] == weight.shape[1]:
                names = (name for _, caller in owners for name, each in caller.named_modules() if each is layer)
                name = next(filter(None, names), type(layer).__name__)
                return _no_rows(f"layer {name!r} was given 0 rows (shape {tuple(given.shape)})", repr(name))
    # In a backward pass no layer is on the way.
    scaling = any(frame.f_code.co_name == "tensor_to_amax" for frame in frames)
    of_nothing = scaling and re.search(r"max\(\): Expected reduction dim", str(error))
    return _no_rows("an FP8 layer was given 0 rows", "names") if of_nothing else None


def _no_rows(seen: str, name: str) -> tuple[Code, str, str]:
    words = said()["no_rows"]
    return R.NO_ROWS, words["cause"].format(seen=seen), words["next"].format(name=name)


def _mend(error: BaseException) -> str:
    """What to do where the user's own line raised one of :data:`SLIPS`, or says ``raise`` itself."""
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    if not (innermost and is_users(innermost[0].filename)):
        return ""
    file, line, name, text = innermost[0]
    where = f"line {line} of {file.rpartition('/')[2]}, in {name}"
    if re.search(r"(^|:)\s*raise\b", text or ""):
        return f"{where}, raised it: see what it checks"
    return f"mend {where}" if isinstance(error, SLIPS) else ""
