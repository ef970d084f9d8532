"""Installed versions of the libraries that a measurement depends on."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

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
