"""The registry of codes: each has a page, a place in the docs and a use; ``pytest-fp8 explain`` shows them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from pytest_fp8.cli import main
from pytest_fp8.codes import K, L, R
from pytest_fp8.codes.pages import LETTERS, codes, pages_of

ROOT = Path(__file__).parent.parent
WRITTEN = list(LETTERS)


def test_no_code_is_given_twice():
    given = [code for letter in LETTERS for code in letter.__members__.values()]
    assert [code for code, times in Counter(map(str, given)).items() if times > 1] == []
    assert all(
        re.fullmatch(rf"FP8-{letter.__name__}\d\d", code) for letter in LETTERS for code in letter.__members__.values()
    )


@pytest.mark.parametrize("letter", WRITTEN, ids=lambda letter: letter.__name__)
def test_a_code_has_a_page_and_a_page_a_code(letter):
    assert set(pages_of(letter)) == set(map(str, letter))
    for code, page in pages_of(letter).items():
        retired = page.means.startswith("Retired")
        assert all(bool(text.strip()) is not retired for text in (page.example, page.instead)), code


def test_each_code_is_used():
    package = ROOT / "pytest_fp8"
    text = "\n".join(path.read_text() for path in package.rglob("*.py") if path != package / "codes/__init__.py")
    used = set(re.findall(r"\b[A-Z]\.[A-Z][A-Z0-9_]+\b", text))
    # The errors in an arm are told in said.toml, which names their codes.
    used |= {f"R.{name}" for name in re.findall(r'^code = "(\w+)"$', (package / "said.toml").read_text(), re.MULTILINE)}
    unused = [code for code in codes() if f"{type(code).__name__}.{code.name}" not in used]
    assert all(pages_of(type(code))[code].means.startswith("Retired") for code in unused), unused


def test_the_docs_hold_all_pages(capsys):
    assert main(["explain", "--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/codes.md").read_text(), "pytest-fp8 explain --markdown"


def test_one_page(capsys):
    for name in ("FP8-R13", "r13", "bad-value"):
        assert main(["explain", name]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("FP8-R13 bad-value\n")
        assert pages_of(R)[R.BAD_VALUE].means in shown
        assert pages_of(R)[R.BAD_VALUE].instead in shown


def test_a_name_of_two_letters(capsys):
    assert main(["explain", "untied"]) == 0
    shown = capsys.readouterr().out
    assert L.UNTIED in shown
    assert K.UNTIED in shown


def test_all_codes(capsys):
    assert main(["explain"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{code}  {code.slug}" for code in codes()]


def test_a_code_that_is_not_known(capsys):
    assert main(["explain", "FP8-R99"]) == 2
    assert capsys.readouterr().err.startswith(f"{R.UNKNOWN_NAME}: no such code")
