"""Installed libraries against the versions that were tested, and the two cuDNNs that a machine may have."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_fp8.codes import R
from pytest_fp8.doctor.line import NOTE, OK, PROBLEM, Line, problem
from pytest_fp8.libraries import library_versions, requirements, wanted

TESTED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.11.0", "2.13.0", "2.14.1"),
    "transformers": ("5.17.0", "5.24.0"),
    "torchao": ("0.18.0",),
    "transformer-engine": ("2.20.2",),
    "accelerate": ("1.15.0",),
    "peft": ("0.21.2",),
    "unsloth": ("2026.10.9",),
}
"""Package -> versions of which docs/compatibility.md says that a suite ran with them."""
NEEDED = ("torch", "transformers")
CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
CUDNN_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64")


def library_findings() -> Iterator[Line]:
    versions, asked = library_versions(TESTED), requirements()
    for package, tested in TESTED.items():
        found, bound = versions.get(package), _bound(asked.get(package, package))
        if found is None:
            state, code = (PROBLEM, R.NOT_INSTALLED) if package in NEEDED else (NOTE, None)
            yield Line("libraries", state, f"{package} is not installed", f"pip install {wanted(package)}", code)
        elif not _within(found, bound):
            text = f"{package} {found} is older than this plugin takes ({bound})"
            yield problem(R.OLD_LIBRARY, "libraries", text, f"pip install {wanted(package)}")
        elif found.partition("+")[0] in tested:
            yield Line("libraries", OK, f"{package} {found}")
        else:
            yield Line("libraries", NOTE, f"{package} {found}: expected to work; tested: {', '.join(tested)}")
    if "torchao" not in versions and "transformer-engine" not in versions:
        text = "neither torchao nor Transformer Engine is installed: nothing here computes in FP8"
        yield problem(R.NOT_INSTALLED, "libraries", text, f"pip install {wanted('torchao')}")


def _bound(requirement: str) -> str:
    """``>=2.9`` of ``transformer-engine[pytorch]>=2.9``; empty where any version will do."""
    from packaging.requirements import Requirement

    return str(Requirement(requirement).specifier)


def _within(found: str, bound: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(bound).contains(found, prereleases=True)


def cudnn_findings() -> Iterator[Line]:
    """Transformer Engine looks for a system cuDNN before torch's own; arms are pointed at torch's."""
    packages = [f"{name} {version}" for name, version in library_versions(CUDNN_PACKAGES).items()]
    system = sorted({str(path.resolve()) for path in _system_cudnns()})
    yield Line("cuDNN", OK if packages else NOTE, "torch's own: " + (", ".join(packages) or "none as a package"))
    if not system:
        yield Line("cuDNN", OK, "the system's: none")
    elif packages:
        yield Line(
            "cuDNN",
            NOTE,
            f"the system's: {', '.join(system)}. Transformer Engine would load it first; arms get torch's own",
            "in your own training, point CUDNN_HOME and LD_LIBRARY_PATH at torch's own as well",
        )
    else:
        yield Line("cuDNN", OK, f"the system's: {', '.join(system)}")


def _system_cudnns() -> Iterator[Path]:
    homes = [Path(os.environ[name]) for name in ("CUDNN_HOME", "CUDNN_PATH") if os.environ.get(name)]
    for folder in [*(home / lib for home in homes for lib in ("lib", "lib64")), *map(Path, CUDNN_FOLDERS)]:
        # The wheel of torch's own is no system library, though a variable may point there.
        if "site-packages" not in str(folder):
            yield from folder.glob("libcudnn.so.*")
