"""The catalogue of controls, all of them.

``cd suites && python -m controls.catalogue`` writes its table into docs/controls.md.
"""

from __future__ import annotations

import re
from pathlib import Path

from controls import arms, checkpoints, conversion, loss, products, ranks, scripts, speed, without_arms  # noqa: F401
from controls.control import CONTROLS, GPU, Control

CATALOGUE: tuple[type[Control], ...] = tuple(sorted(CONTROLS.values(), key=lambda control: str(control.code)))
PAGE = Path(__file__).parents[2] / "docs/controls.md"
BLOCK = re.compile(r"(?<=<!-- catalogue -->\n).*?(?=<!-- end -->)", re.S)


def __getattr__(id: str) -> type[Control]:
    """A control by its id: an arm's process finds its class so (:meth:`Control.path`)."""
    try:
        return CONTROLS[id]
    except KeyError:
        raise AttributeError(f"no control has the id {id!r}") from None


def page() -> str:
    """What docs/controls.md holds between its marks: how many there are, and a row for each."""
    seen = sum(control.source != "constructed" for control in CATALOGUE)
    gpu = [control for control in CATALOGUE if control.runs() == GPU]
    commit = sum(not control.nightly for control in CATALOGUE if control not in gpu)
    several = ", ".join(f"`{control.id}`" for control in gpu if control.case.gpus > 1)
    lines = [
        f"There are {len(CATALOGUE)}. {seen} were seen: in a library's source or tracker, in a user's report, or in "
        "this project's own runs ([measurements](measurements.md)). The others are *constructed*: faults that the gate "
        "must see and of which no report is known.",
        "",
        f"{len(CATALOGUE) - len(gpu)} run on any machine, on emulated FP8 or without an arm: `tox -e suite` runs "
        f"{commit} of them, one of each kind, and `tox -e nightly` the others. {len(gpu)} need a GPU, {several} two.",
        "",
        "| control | what is broken | found by | as | seen |",
        "|---|---|---|---|---|",
    ]
    for control in CATALOGUE:
        found = " or ".join(control.verdicts).replace("_", " ")
        where = f"{control.question}{' (GPU)' * (control in gpu)}"
        lines.append(f"| {control.id} | {control.title} | {where} | {found}: `{control.code}` | {control.source} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # Run as a program, this module is another one than the arms import; the table is the same.
    PAGE.write_text(BLOCK.sub(lambda _: page(), PAGE.read_text()))
