"""Test files with a mark, and what pytest makes of them."""

TWICE = "During handling of the above exception, another exception occurred"
"""Stands between two errors where the second one hides the first."""


def collect(pytester, mark, *arguments):
    """A session of one test. A wrong mark does not interrupt it: pytest would write out where it was, for half a second
    that nobody reads."""
    pytester.makepyfile(f"import pytest\nimport pytest_fp8\n{mark}\ndef test_mine(fp8_case): pass")
    return pytester.runpytest("--strict-markers", "--continue-on-collection-errors", *arguments)


def ids(pytester, code):
    pytester.makepyfile(f"import pytest\n{code}")
    lines = pytester.runpytest("--collect-only", "-q").outlines
    return [line.split("[")[1].rstrip("]") for line in lines if "::" in line]
