"""The header lines: which GPU, which libraries, which baselines."""

from __future__ import annotations

from pytest_fp8.options import Settings

LIBRARIES = ("torch", "torchao", "transformer-engine")


def header(settings: Settings, look: bool) -> list[str]:
    """The lines for pytest's header. ``look``: whether to ask the driver, which a mere collection does not."""
    declared = "auto" if not settings.declared else f"{settings.gpu}, declared"
    key = settings.gpu
    if not look:
        return [f"fp8: GPU not looked at for a mere collection (--fp8-gpu: {declared})"]
    from pytest_fp8.gpu import detect
    from pytest_fp8.libraries import library_versions

    gpu, reason = detect()
    seen = f"{gpu.name}, driver {gpu.driver}" if gpu is not None else reason
    key = gpu.key if gpu is not None else key
    folder, place = settings.baseline_dir / key, settings.baseline_dir.name
    stored = len(list(folder.glob("[!_.]*.json"))) if folder.is_dir() else 0
    baselines = f"{stored} in {place}/{key}" if key != "auto" else place
    if not settings.baseline_dir.is_dir():
        baselines = f"none, there is no folder {place}"
    if settings.base:
        baselines += f"; base {settings.base}"
    update = " (updating)" if settings.update else ""
    versions = library_versions(LIBRARIES)
    libraries = ", ".join(f"{name} {versions[name]}" if name in versions else f"no {name}" for name in LIBRARIES)
    return [f"fp8: {seen} (--fp8-gpu: {declared}); {libraries}; baselines: {baselines}{update}"]
