"""report.json while tests run: what is known so far, so that even SIGKILL leaves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_fp8.report.ledger import Ledger

LEAST_SECONDS = 5.0
"""Between two reports."""
MOST_SHARE = 0.02
"""Of the session's time that they may take."""


class Interim:
    """What xdist's workers have told so far, and when the report was written last."""

    def __init__(self) -> None:
        self.told: dict[str, Mapping[str, Any]] = {}
        """Worker -> its ledger as plain data, after its last test."""
        self.closed = False
        """Whether the session's own ledger has it all."""
        self.origin: dict[str, Any] = {}
        """Where the session's measurements come from, once it was looked up."""
        self._next = 0.0
        self._earlier: bool | None = None

    def close(self, ledger: Ledger) -> None:
        """The session ends: add what workers have told that ended without a last word."""
        self.closed = True
        for told in self.told.values():
            ledger.merge(told)

    def found_report(self, folder: Path) -> bool:
        """Whether an earlier session's report lay in the folder before this session's first."""
        if self._earlier is None:
            from pytest_fp8.report.files import holds_report

            self._earlier = holds_report(folder)
        return self._earlier

    def write(self, ledger: Ledger, folder: Path | None, origin: Callable[[], dict[str, Any]]) -> None:
        """Write the report of what is known, unless the last one is recent. The end of the session writes it whole, and
        tells where that fails."""
        start = time.monotonic()
        if folder is None or start < self._next:
            return
        from pytest_fp8.errors import Fp8Error
        from pytest_fp8.report.files import write_report

        self.found_report(folder)
        known = Ledger()
        known.merge(ledger.to_json())
        for told in self.told.values():
            known.merge(told)
        known.partial = True
        if known.entries:
            self.origin = self.origin or origin()
            try:
                write_report(known, folder, self.origin, finished=False)
            except Fp8Error:
                self._next = float("inf")
                return
        now = time.monotonic()
        self._next = now + max(LEAST_SECONDS, (now - start) / MOST_SHARE)
