"""What having the plugin costs: `pytest --collect-only` with and without it, alternating, medians in milliseconds.

    python benchmarks/startup.py [RUNS]

Exits with 1 where the difference is over the budget. Each run is a process of its own, so the figure holds the plugin's
imports, options, hooks and header.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUDGET_MS = 30.0


def collect(folder: str, *more: str) -> float:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        *more,
    ]
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (time.perf_counter() - start) * 1000


def main(runs: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_one.py").write_text("def test_one(): pass\n")
        Path(folder, "pytest.ini").write_text("[pytest]\n")
        collect(folder)
        collect(folder, "-p", "no:fp8")
        pairs = [(collect(folder), collect(folder, "-p", "no:fp8")) for _ in range(runs)]
    with_plugin, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    cost = statistics.median(a - b for a, b in pairs)
    print(
        f"collect-only: {with_plugin:.0f} ms with pytest-fp8, {without:.0f} ms without; "
        f"it costs {cost:.1f} ms (budget {BUDGET_MS:.0f} ms)"
    )
    return int(cost > BUDGET_MS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 15))
