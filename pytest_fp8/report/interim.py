"""What is known so far, on disk while tests run: report.json, and candidates of the cases that are done, so that even
SIGKILL and a machine that goes away leave them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_fp8.report.ledger import Ledger

LEAST_SECONDS = 5.0
"""Between two reports, where nothing long is waited for."""
MOST_SHARE, AT_FIRST = 0.02, 1.0
"""Of the session's time that they may take, and the seconds that they may take before that."""


class Interim:
    """What xdist's workers have told so far, and when the report was written last."""

    def __init__(self) -> None:
        self.told: dict[str, Mapping[str, Any]] = {}
        """Worker -> its ledger as plain data, after its last test."""
        self.closed = False
        """Whether the session's own ledger has it all."""
        self.origin: dict[str, Any] = {}
        """Where the session's measurements come from, once it was looked up."""
        self.news = False
        """Whether a test has ended since the last report."""
        self._began, self._last = time.monotonic(), -math.inf
        self._spent = 0.0
        """Seconds that reports took."""
        self._failed = False
        self._earlier: bool | None = None
        self._done: set[str] = set()
        """Cases that have their candidate."""

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

    def write(
        self,
        ledger: Ledger,
        folder: Path | None,
        baselines: Path,
        origin: Callable[[], dict[str, Any]],
        waits: bool = False,
    ) -> None:
        """Write what is known, unless it is on disk already, was written a moment ago, or writing takes too long.
        ``waits``: an arm is waited for next, and nobody knows how long. The end of the session writes it whole, and
        tells where that fails."""
        if folder is None or not self.news or self._failed:
            return
        start = time.monotonic()
        soon = not waits and start < self._last + LEAST_SECONDS
        if soon or self._spent > AT_FIRST + MOST_SHARE * (start - self._began):
            return
        known = Ledger()
        known.merge(ledger.to_json())
        for told in self.told.values():
            known.merge(told)
        known.partial = True
        if known.entries:
            if not self.origin:
                # git may take seconds, once.
                self.origin = origin()
                start = time.monotonic()
            self._write(known, folder, baselines)
        self._last = time.monotonic()
        self._spent += self._last - start
        self.news = False

    def _write(self, known: Ledger, folder: Path, baselines: Path) -> None:
        from pytest_fp8.errors import Fp8Error
        from pytest_fp8.report.files import write_candidates, write_report

        self.found_report(folder)
        still_open = known.open_tests or {}
        done = {name for name in known.entries if not still_open.get(name)} - self._done
        self._done |= done
        with contextlib.suppress(Fp8Error):
            # Those of the other cases are written all the same.
            write_candidates(known, folder, baselines, self.origin, done)
        try:
            write_report(known, folder, self.origin, finished=False)
        except Fp8Error:
            self._failed = True
