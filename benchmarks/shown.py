"""``python -m benchmarks.shown``: rewrite what README and docs show, from the files and the runs that they show.

A block below ``<!-- file: examples/test_loop.py -->`` is that file. One below ``<!-- output: a run -->`` is the end of
what pytest prints for an example, as it is or broken (:data:`RUNS`); ``--run`` makes those anew.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- (?P<kind>file|output): (?P<name>.+?) -->\n```\w*\n)(?P<body>.*?)(?=^```$)", re.M | re.S)
NAME = "test_my_model.py"
EXAMPLE, TUTORIAL = ROOT / "examples/test_model.py", ROOT / "examples/tutorial"
WIDTH = 100
FILTERED = '''

def convert(model):
    """Its filter waits for the names of another model."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda module, name: name.startswith("layers."))
'''


def pages() -> list[Path]:
    """The files that may show something."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def end(files: dict[str, str], *arguments: str) -> str:
    """What a session prints from the closing table on."""
    return session(files, *arguments).rpartition("[100%]\n")[2]


def broken() -> str:
    """The message of a conversion whose filter lets nothing through, as pytest shows it without its margin."""
    code = EXAMPLE.read_text().replace("Workload(build, ", "Workload(build, convert=convert, ")
    shown = session({NAME: code + FILTERED}, status=1)
    message = re.search(r"^E +pytest_fp8\S+: (FAIL .*?\n)(?!E )", shown, re.M | re.S)
    assert message, shown
    return "\n".join(re.sub(r"^E {,7}", "", line) for line in message[1].splitlines())


RUNS: dict[str, Callable[[], str]] = {
    "a run": lambda: end({NAME: EXAMPLE.read_text()}),
    "a broken run": broken,
    # As far as it needs no GPU.
    "the tutorial": lambda: end(
        {name: (TUTORIAL / name).read_text() for name in ("train.py", "test_fp8.py")}, "-k", "without"
    ),
}


def session(files: dict[str, str], *arguments: str, status: int = 0) -> str:
    """What pytest prints in a folder of these files, without the lines that tell what a slow machine waits for."""
    with tempfile.TemporaryDirectory() as folder:
        for name, code in files.items():
            (Path(folder) / name).write_text(code)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environment["COLUMNS"] = str(WIDTH)
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != status:
        raise RuntimeError(f"exit status {done.returncode}:\n{done.stdout}{done.stderr}")
    without = re.sub(r"^fp8: \S+: .* in all\n", "", done.stdout, flags=re.M)
    # The empty line above the table is there where no such line was written.
    return re.sub(r"^(=+ FP8 =+\n)\n", r"\1", without, flags=re.M)


def shape(output: str) -> list[str]:
    """The lines of an output without its numbers, and without times: a slow host says them in other words."""
    timeless = [re.sub(r"^time in arms.*| in [\d.]+s\b.*", "", line) for line in output.strip().splitlines()]
    return [re.sub(r"[ ─=.]+", " ", re.sub(r"[+-]?\d+(\.\d+)?", "0", line)) for line in timeless]


def filled(page: str, run: bool) -> str:
    """The page with its blocks as they should be; outputs stay as they are where nothing is run."""

    def block(found: re.Match[str]) -> str:
        if found["kind"] == "file":
            return found[1] + (ROOT / found["name"]).read_text()
        return found[1] + (RUNS[found["name"]]().rstrip() + "\n" if run else found["body"])

    return BLOCK.sub(block, page)


def main() -> None:
    """Rewrite the pages in place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the examples whose output is shown, too")
    options = parser.parse_args()
    for page in pages():
        text = page.read_text()
        if (new := filled(text, options.run)) != text:
            page.write_text(new)
            print(f"rewrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
