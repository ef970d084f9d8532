"""The catalogue of controls: every class of this package that states a number, in the order of the numbers.

``cd suites && python -m controls.catalogue`` prints it for docs/controls.md.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import controls
from controls.control import Control


def _controls() -> Iterator[type[Control]]:
    for module in pkgutil.iter_modules(controls.__path__, "controls."):
        for value in vars(import_module(module.name)).values():
            stated = isinstance(value, type) and issubclass(value, Control) and "number" in vars(value)
            # A module also holds the classes that it imports from others.
            if stated and value.__module__ == module.name:
                yield value


CATALOGUE: tuple[type[Control], ...] = tuple(sorted(_controls(), key=lambda control: control.number))


def table() -> str:
    """The catalogue as docs/controls.md shows it."""
    rows = ["| | control | found by | as | seen |", "|---|---|---|---|---|"]
    for control in CATALOGUE:
        found = " or ".join(control.verdicts).replace("_", " ")
        code = f"`{control.code}`"
        rows.append(f"| {control.number} | {control.title} | {control.question} | {found}: {code} | {control.source} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
