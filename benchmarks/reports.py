"""A run's ``report.json``, read as a file from a stranger: strictly, and with one clear error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_fp8.baselines.strict import NAME, Unsound, decoded, parse
from pytest_fp8.report.files import MOST_BYTES


@contextmanager
def report_at(path: Path) -> Iterator[dict[str, Any]]:
    """The report in a file, for the block that uses it. Ends the program with one line and exit code 2 where the file
    cannot be read, or the block finds that something is missing in it or of another kind than a run writes."""
    try:
        data = parse(decoded(path.read_bytes(), MOST_BYTES))
        wrong = [name for name in data["entries"] if not re.fullmatch(NAME, name)]
        if wrong:
            raise Unsound(f"{wrong[0]!r:.80} names no case")
        yield data
    except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        print(f"{path} is not a report that a run wrote: {type(error).__name__}: {error}"[:500])
        print("  next: run the tests again with --fp8-report")
        raise SystemExit(2) from None
