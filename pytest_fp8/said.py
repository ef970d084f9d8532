"""The sentences of errors in an arm: ``said.toml``, read when the first of them is raised."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from pytest_fp8.codes import Code, R


@cache
def said() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


class Told(Exception):
    """Entry of its class's name has ``fp8_code``, ``fp8_cause`` and ``fp8_next``, where the error has none itself."""

    def __getattr__(self, name: str) -> Any:
        part = name.removeprefix("fp8_")
        for kind in type(self).__mro__:
            if part in (entry := said()["error"].get(kind.__name__, {})):
                return R[entry[part]] if part == "code" else entry[part]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class WorkloadError(ValueError):
    """A function of the workload gives something that cannot be trained with: entry ``which`` of ``said.toml``."""

    def __init__(self, which: str, /, **facts: Any) -> None:
        entry = said()["workload"][which]
        error, self.fp8_cause, self.fp8_next = (entry[part].format(**facts) for part in ("error", "cause", "next"))
        self.fp8_code: Code = R[entry["code"]]
        super().__init__(error)
