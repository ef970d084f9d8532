"""Installed versions of the libraries that a measurement depends on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "torchao", "transformer-engine", "transformers", "triton", "pytest-fp8")


def library_versions() -> dict[str, str]:
    """Package -> installed version, of :data:`PACKAGES`; a package that is not installed is left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
