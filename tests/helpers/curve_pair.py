"""Stands in for a pair of arms that are asked for loss curves."""

from __future__ import annotations

from typing import Any


class CurvePair:
    """What is asked once is kept, as by real arms. A test's own class adds ``case``, ``fp8`` and ``bf16``."""

    fp8: Any

    def __init__(self):
        self.asked, self._kept = [], {}

    def once(self, what, ask):
        if what not in self._kept:
            self._kept[what] = ask()
        return self._kept[what]

    shared = once

    def beside(self, operation, reference, **arguments):
        return self.fp8.request(operation, **arguments), reference()
