"""Versions of libraries: what is recent enough."""

import tomllib
from pathlib import Path

import pytest

import pytest_fp8.libraries
from pytest_fp8.libraries import documentation, installed


@pytest.mark.parametrize(
    ("found", "recent"),
    [
        ("1.10", True),
        ("1.10.0", True),
        ("1.11rc1", True),
        ("1.11.0.dev20261101", True),
        ("1.10.post1", True),
        ("1.10.0+cu128", True),
        ("2.0", True),
        ("1.9.2", False),
        ("1.10rc1", False),
        ("1.10.0.dev0", False),
        ("1.9.9.post1", False),
        ("1.9+cu128", False),
    ],
)
def test_a_version_is_ordered_as_pep_440_says(monkeypatch, found, recent):
    monkeypatch.setattr(pytest_fp8.libraries, "version", lambda package: found)
    reason = f"thing {found}" if recent else f"thing {found} is older than 1.10"
    assert installed("thing", "1.10") == (recent, reason)


def test_the_documentation_is_where_pyproject_says():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert documentation() == project["urls"]["Documentation"]


def test_a_package_that_is_not_there_says_how_to_get_it():
    assert installed("no-such-package-at-all", "1")[1] == (
        "no-such-package-at-all is not installed: pip install no-such-package-at-all"
    )


def test_a_version_that_cannot_be_compared_is_not_recent_enough(monkeypatch):
    monkeypatch.setattr(pytest_fp8.libraries, "version", lambda package: "main-abc")
    assert installed("thing", "1.10") == (False, "thing main-abc has no version that can be compared with 1.10")
