"""What pytest-html shows of a test: its answers, their numbers as JSON, and where the page with the pictures is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from pytest_fp8.plain import to_plain
from pytest_fp8.report.files import finite
from pytest_fp8.report.formats import figures
from pytest_fp8.report.page.write import NAME, missing


def html_extras(
    html: str, report_dir: Path | None, case: str, decisions: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The extras of a test that asked ``decisions``, by question. ``html``: the path of pytest-html's own report.
    ``report_dir``: where this run writes its page, if it does."""
    from pytest_html import extras

    found = [extras.html(_answer(question, decision)) for question, decision in decisions.items()]
    if decisions:
        found.append(extras.json(finite(to_plain(dict(decisions))), name=f"{case}: evidence"))
    if report_dir is not None and not missing():
        beside = Path(os.path.expandvars(html)).expanduser().absolute().parent
        found.append(extras.url(os.path.relpath(report_dir / NAME, beside), name="pictures of this run"))
    return found


def _answer(question: str, decision: Mapping[str, Any]) -> str:
    measured = figures({"decisions": {question: decision}})
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{value:.6g}</td></tr>" for name, value in measured.items())
    verdict = " ".join(filter(None, (decision["verdict"], decision.get("code"))))
    return (
        f"<h4>{escape(question)}: {escape(verdict)}: {escape(decision['headline'])}</h4>"
        f"<table>{cells}</table><pre>{escape(decision['message'])}</pre>"
    )
