"""Writes the page: beside a run's report, and again from one or several reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_fp8.baselines.atomic import write_atomically
from pytest_fp8.codes import R
from pytest_fp8.errors import Fp8Error
from pytest_fp8.report.exports import below

NAME = "index.html"
EXTRA = ("jinja2", "matplotlib")
INSTALL = "pip install 'pytest-fp8[report]'"
"""What brings them, in a clone too: pip takes the installed pytest-fp8 and installs what the extra adds."""


def missing() -> list[str]:
    """What the extra would bring and is not installed."""
    return [name for name in EXTRA if find_spec(name) is None]


def write_page(paths: Sequence[Path], target: Path) -> None:
    """Read the reports, the newest last, and write their page. Raises :class:`Fp8Error`."""
    from pytest_fp8.report.reading import read_report

    # A page is shown to others, whom the folders of this machine do not concern.
    reports = [(below(path, Path.cwd()), read_report(path)) for path in paths]
    if missing():
        raise Fp8Error(
            R.NOT_INSTALLED,
            f"the page needs {' and '.join(missing())}",
            cause="pictures are drawn by matplotlib, and jinja2 escapes what stands between them",
            next_step=INSTALL,
        )
    # A name may hold what no encoding can write.
    text = render(reports).encode(errors="replace").decode()
    if target.exists() and not (target.is_file() or target.is_dir()):
        _write_into(target, text)
    else:
        # What a link leads to is written, and the link stays.
        write_atomically(target.resolve(), text)


def _write_into(target: Path, text: str) -> None:
    """Into a pipe or a device, such as ``/dev/stdout``: one that was replaced by a file would be gone."""
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Fp8Error(
            R.NOT_WRITABLE,
            f"cannot write {target}: {type(error).__name__}: {error.strerror}",
            next_step="name another file with -o",
        ) from None


def render(reports: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The page. Everything but the drawn SVG is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from pytest_fp8.report.page.view import page_of

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["drawn"] = Markup
    return str(environment.get_template("page.html.j2").render(page=page_of(reports)))
