"""Installed versions of the libraries that a measurement depends on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version

DOCUMENTATION = "https://github.com/pytest-fp8/pytest-fp8/blob/main/docs"
PACKAGES = ("torch", "torchao", "transformer-engine", "transformers", "triton", "pytest-fp8")


def library_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Package -> installed version; a package that is not installed is left out."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def documentation(page: str = "") -> str:
    """The address of the documentation, or of one page, as pyproject.toml has it."""
    return f"{DOCUMENTATION}/{page or 'index.md'}"


def requirements() -> dict[str, str]:
    """Package -> what this plugin's own metadata asks for, extras included: ``transformer-engine[pytorch]>=2.9``."""
    try:
        lines = requires("pytest-fp8") or []
    except PackageNotFoundError:
        return {}
    asked = [line.partition(";")[0].strip() for line in lines]
    named = [(re.match(r"[A-Za-z0-9._-]+", line), line) for line in asked]
    return {match[0]: line for match, line in named if match and match[0] != "pytest-fp8"}


def wanted(package: str) -> str:
    """A package as this plugin needs it, quoted for a shell: what stands behind every ``pip install`` in a message.

    >>> wanted("transformer-engine")
    "'transformer-engine[pytorch]>=2.9'"
    """
    return shlex.quote(requirements().get(package, package))


def changed_versions(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What differs: ``torch 2.11.0 -> 2.12.0``."""
    names = sorted({*old, *new})
    return [
        f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in names if old.get(name) != new.get(name)
    ]


def installed(distribution: str, minimum: str) -> tuple[bool, str]:
    """Whether a package is there and recent enough, without importing it, and the reason. PEP 440 orders versions: a
    pre-release of ``minimum`` is older than it."""
    from packaging.version import InvalidVersion, Version

    try:
        found = version(distribution)
    except PackageNotFoundError:
        return False, f"{distribution} is not installed: pip install {wanted(distribution)}"
    try:
        older = Version(found) < Version(minimum)
    except InvalidVersion:
        return False, f"{distribution} {found} has no version that can be compared with {minimum}"
    if older:
        return False, f"{distribution} {found} is older than {minimum}"
    return True, f"{distribution} {found}"
