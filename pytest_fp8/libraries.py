"""Installed versions of the libraries that a measurement depends on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def changed_versions(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What differs: ``torch 2.11.0 -> 2.12.0``."""
    names = sorted({*old, *new})
    return [
        f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in names if old.get(name) != new.get(name)
    ]
