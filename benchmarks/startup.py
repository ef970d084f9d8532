"""What having the plugin costs: `pytest --collect-only` with and without it, alternating, CPU milliseconds.

    python benchmarks/startup.py [MOST]

Each run is a process of its own, so the figure holds the plugin's imports, options, hooks and header. CPU time and not
wall time: starting is one thread's work, and what else the machine does meanwhile counts less. The budget is 30 ms, or
a tenth of a bare collection where the machine is so slow that this takes longer than 300 ms. Pairs are added, up to
MOST (30), until the median difference lies three standard errors from it. Exits with 1 where it is above.

With PYTHONDONTWRITEBYTECODE=1, as many container images set it: pytest then rewrites and compiles a plugin's modules
anew each time, beside all that it does where it may keep them. The package itself is compiled, as pip does when it
installs one.
"""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest_fp8

BUDGET_MS = 30.0
BUDGET_SHARE = 0.1
FEWEST = 5


def collect(folder: str, env: dict[str, str], *more: str) -> float:
    """The CPU milliseconds of one collection, user and system. Raises :class:`RuntimeError` where it fails."""
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", *options, *more]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}")
    return (used.ru_utime + used.ru_stime) * 1000


def main(most: int) -> int:
    """Measure and print; 1 where it is above the budget."""
    compileall.compile_dir(Path(pytest_fp8.__file__).parent, quiet=2)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_one.py").write_text("def test_one(): pass\n")
        Path(folder, "pytest.ini").write_text("[pytest]\n")
        collect(folder, env)
        collect(folder, env, "-p", "no:fp8")
        while True:
            pairs.append((collect(folder, env), collect(folder, env, "-p", "no:fp8")))
            plugin, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
            budget = max(BUDGET_MS, BUDGET_SHARE * bare)
            differences = [one - other for one, other in pairs]
            cost = statistics.median(differences)
            # A median's standard error, from the median absolute deviation, as for normal differences.
            deviation = statistics.median(abs(value - cost) for value in differences)
            error = 1.253 * 1.483 * deviation / len(differences) ** 0.5
            decided = len(pairs) >= FEWEST and abs(cost - budget) > 3 * error
            if decided or len(pairs) >= most:
                break
    print(
        f"collect-only: {plugin:.0f} ms of CPU time with pytest-fp8, {bare:.0f} ms without; "
        f"it costs {cost:.1f} +-{error:.1f} ms (budget {budget:.0f} ms, {len(pairs)} pairs)"
        + ("" if decided else ": too noisy to decide, repeat it on a quiet machine")
    )
    return int(decided and cost > budget)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
