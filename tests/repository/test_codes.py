"""The registry of codes: each has a page, a place in the docs and a use; ``pytest-fp8 explain`` shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fp8.cli import main
from pytest_fp8.codes import LETTERS, K, L, R, pages_of
from pytest_fp8.codes.pages import codes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("letter", LETTERS, ids=lambda letter: letter.__name__)
def test_a_code_has_a_page_and_a_page_a_code_or_is_retired(letter):
    pages = pages_of(letter)
    assert set(map(str, letter)) <= pages.keys()
    assert len(set(letter.__members__.values())) == len(letter.__members__)
    for code, page in pages.items():
        assert re.fullmatch(rf"FP8-{letter.__name__}\d\d", code)
        retired = page.means.startswith("Retired")
        assert retired is (code not in list(letter)), code
        assert all(bool(text.strip()) is not retired for text in (page.example, page.instead)), code


def test_each_code_is_used():
    package = ROOT / "pytest_fp8"
    text = "\n".join(path.read_text() for path in package.rglob("*.py") if path != package / "codes/__init__.py")
    used = set(re.findall(r"\b[A-Z]\.[A-Z][A-Z0-9_]+\b", text))
    # The errors in an arm are told in said.toml, which names their codes.
    used |= {f"R.{name}" for name in re.findall(r'^code = "(\w+)"$', (package / "said.toml").read_text(), re.MULTILINE)}
    assert [code for code in codes() if f"{type(code).__name__}.{code.name}" not in used] == []


def test_the_docs_hold_all_pages(capsys):
    assert main(["explain", "--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/codes.md").read_text(), "pytest-fp8 explain --markdown"


@pytest.mark.parametrize(
    ("asked", "status", "shown"),
    [
        *(
            (name, 0, ["FP8-R13 bad-value\n", R.BAD_VALUE.page.means, R.BAD_VALUE.page.instead])
            for name in ("FP8-R13", "r13", "bad-value")
        ),
        ("untied", 0, [L.UNTIED, K.UNTIED]),
        ("c05", 0, ["FP8-C05 retired"]),
        ("FP8-R99", 2, [f"{R.UNKNOWN_NAME}: no such code"]),
    ],
)
def test_the_pages_of_a_name_are_shown(capsys, asked, status, shown):
    assert main(["explain", asked]) == status
    said = capsys.readouterr()[status > 0]
    assert said.startswith(shown[0])
    assert all(each in said for each in shown)


def test_all_codes(capsys):
    assert main(["explain"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{code}  {code.slug}" for code in codes()]
