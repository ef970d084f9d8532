"""Which tests would notice that a check is gone: faults by tests, for the tests of each commit.

    python -m benchmarks.killers [-o TABLE.md] [PYTEST'S ARGUMENTS ...]

Each test runs once, and what it is told is kept: the codes of findings and errors. It then runs once more for each of
these codes that a control has, with that code's check taken out: its finding is a PASS, its error has no code. A test
that fails then *kills* the fault. Those of tests/words make their findings while they are imported, one for each code:
they run once with all codes out. Without arguments: the tests that name such a code, and the emulated controls of each
commit. Exits with 1 where a control's code has no killer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from pytest_fp8.errors import Fp8Error
from pytest_fp8.verdicts import Finding, Verdict

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "suites"))

from controls.catalogue import CATALOGUE  # noqa: E402
from controls.control import GPU  # noqa: E402

ROWS = "KILLERS_ROWS"
"""The variable that names the file of rows, one for each run of a test: code, ``killed`` or ``survived``, test."""
WORDS = "tests/words"
CODES = {control.code for control in CATALOGUE}

said: set[str] = set()
taken_out: set[str] = set()


def watch_findings() -> None:
    checked, made = Finding.__post_init__, Fp8Error.__init__

    def found(self: Finding) -> None:
        said.add(str(self.code))
        if self.code in taken_out:
            object.__setattr__(self, "code", None)
            object.__setattr__(self, "verdict", Verdict.PASS)
        checked(self)

    def raised(self: Fp8Error, code: Any, headline: str, **lines: str) -> None:
        said.add(str(code))
        made(self, None if code in taken_out else code, headline, **lines)

    Finding.__post_init__, Fp8Error.__init__ = found, raised  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(ROWS):
        watch_findings()
        if WORDS in config.args:
            taken_out.update(map(str, CODES))


def write(code: str, outcome: str, item: pytest.Item) -> None:
    with open(os.environ[ROWS], "a") as rows:
        rows.write(f"{code}\t{outcome}\t{item.nodeid}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not os.environ.get(ROWS):
        return None
    if WORDS in item.config.args:
        code = item.callspec.params.get("code") if hasattr(item, "callspec") else None
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=nextitem)) and code in CODES:
            write(str(code), "killed", item)
        return True
    # The next one is of the same module, as far as fixtures are concerned: they last until the last run.
    said.clear()
    if any(report.outcome != "passed" for report in runtestprotocol(item, log=True, nextitem=item)):
        return True
    for code in sorted(said & {str(code) for code in CODES}):
        taken_out.add(code)
        failed = any(report.failed for report in runtestprotocol(item, log=False, nextitem=item))
        taken_out.clear()
        write(code, "killed" if failed else "survived", item)
    # Once more, to take down what the next test does not share.
    runtestprotocol(item, log=False, nextitem=nextitem)
    return True


def naming_a_code() -> Iterator[str]:
    """The test files that name a control's code: as a member, ``N.SCALE``, or as text."""
    words = {f"{type(code).__name__}.{code.name}" for code in CODES} | {f'"{code}"' for code in CODES}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        text = path.read_text()
        if any(word in text for word in words):
            yield str(path.relative_to(ROOT))


def table(rows: list[list[str]]) -> Iterator[str]:
    killers = defaultdict(list)
    for code, outcome, test in rows:
        if outcome == "killed":
            killers[code].append(test)
    yield "| code | controls of each commit | each night | tests that fail without it | one of them |"
    yield "|---|---|---|---|---|"
    for code in sorted(CODES):
        mine = [control for control in CATALOGUE if control.code is code]
        each = [f"{control.id}{' (GPU)' * (control.runs() == GPU)}" for control in mine if not control.nightly]
        night = [control.id for control in mine if control.nightly]
        found = killers[str(code)]
        one = next((test for test in found if "words" not in test), *found[:1] or [""])
        yield f"| {code} | {', '.join(each)} | {', '.join(night)} | {len(found)} | {one} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.killers", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="also write the table there")
    options, given = parser.parse_known_args(arguments)
    asked = given or [*naming_a_code(), "suites/test_controls.py"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows")
        file.touch()
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.killers", "-p", "no:cacheprovider", "-q"]
        env = {**os.environ, ROWS: str(file)}
        for part in ([WORDS], asked) if not given else (asked,):
            subprocess.run([*command, "-m", "not nightly", *part], cwd=ROOT, env=env, check=False)
        rows = [line.split("\t") for line in file.read_text().splitlines()]
    text = "\n".join(table(rows))
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    killed = {code for code, outcome, _ in rows if outcome == "killed"}
    missing = sorted(str(code) for code in CODES if str(code) not in killed)
    print(f"{len(CODES) - len(missing)} of {len(CODES)} codes have a killer", *missing)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
