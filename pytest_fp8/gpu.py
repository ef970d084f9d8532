"""The GPU of this machine, as NVML describes it: its kind, what it can do, its state and who uses it. No torch."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse

FAMILIES = {"hopper": (9,), "blackwell": (10, 12), "ada": (8,)}
"""Names of ``--fp8-gpu`` that fit any GPU of these major compute capabilities."""
KINDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("gh200", "h200", "h100", "h800", "h20"), (9,)),
    **dict.fromkeys(("gb300", "gb200", "b300", "b200"), (10,)),
    "l40s": (8,),
    **FAMILIES,
}
"""All its names. One that is no family's stands in the driver's own; a GPU gets the first that fits it, for its
baselines too."""
MIG = re.compile(r"\bMIG\b")
"""In what the driver calls a slice of a GPU: ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``."""
CHIP_OF_MAJOR = {major: family for family, majors in FAMILIES.items() for major in majors}

# nvmlClocksEventReason*: reasons of clock throttling. The software power cap (0x4) is left out: a large product at full
# rate reaches it on a healthy card.
THROTTLES = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it; memory in bytes, power limit in watts."""

    name: str
    capability: tuple[int, int]
    memory: int
    driver: str
    power_limit: float

    @property
    def key(self) -> str:
        """Its name in ``--fp8-gpu`` and in the baselines' folder. A slice of a GPU (MIG) is none of these kinds."""
        for name, majors in () if MIG.search(self.name) else KINDS.items():
            stands = re.search(rf"\b{name}\b", self.name, re.IGNORECASE)
            if self.capability[0] in majors and (name in FAMILIES or stands):
                return name
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "unknown"

    @property
    def chip(self) -> str:
        """hopper, blackwell or ada; empty where the GPU has no FP8 tensor cores."""
        if self.capability == (8, 9) or self.capability[0] >= 9:
            return CHIP_OF_MAJOR.get(self.capability[0], "")
        return ""

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "capability": ".".join(map(str, self.capability))}


def known(name: str) -> str:
    """The declared name in lower case; raises :class:`SettingsError` for one that is not known."""
    lowered = name.strip().lower()
    if lowered not in ("auto", *KINDS):
        # Nothing near is named: an A100 is no H100.
        headline = f"--fp8-gpu={name}: no GPU with FP8 of that name is known"
        refuse(R.UNKNOWN_GPU, headline, expected=", ".join(["auto", *KINDS]), seen=name)
    return lowered


def is_kind(gpu: Gpu, name: str) -> bool:
    """Whether a GPU is what was declared: ``hopper`` fits any Hopper, ``h200`` an H200 alone."""
    return gpu.chip != "" and gpu.capability[0] in KINDS[name] and (name in FAMILIES or gpu.key == name)


def visible() -> list[str]:
    """The GPUs that a CUDA program started from here would see, in its order, each as ``CUDA_VISIBLE_DEVICES`` names
    one: by index or UUID. Empty where there are none, or NVML is not installed; without those that are lost."""
    return _devices()[0]


def _devices() -> tuple[list[str], str]:
    """The names of :func:`visible`, and why there are none."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None:
        # CUDA stops reading at the first name that is no GPU.
        named = list(takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in text.split(","))))
        return named, f"no GPU: CUDA_VISIBLE_DEVICES={text!r} hides them all"
    try:
        import pynvml
    except ImportError:
        return [], "no GPU can be seen: nvidia-ml-py is not installed"
    found, why = [], "no NVIDIA GPU"
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return [], f"{why} ({error})"
    for index in range(count):
        try:
            # Not by index: a CUDA program of the user's counts the fastest GPU first, NVML the first on the bus.
            found.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError as error:
            why = f"{why} ({error})"
    return found, why


@lru_cache(maxsize=1)
def detect() -> tuple[Gpu | None, str]:
    """The first of :func:`visible`, or ``None`` and the reason there is none."""
    names, why = _devices()
    if not names:
        return None, why
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = _handle(names[0])
        power = 0.0
        with contextlib.suppress(pynvml.NVMLError):
            power = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        return Gpu(
            name=pynvml.nvmlDeviceGetName(handle),
            capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            driver=pynvml.nvmlSystemGetDriverVersion(),
            power_limit=power,
        ), ""
    except ImportError:
        return None, "no GPU can be seen: nvidia-ml-py is not installed"
    except pynvml.NVMLError as error:
        return None, f"no NVIDIA GPU: {names[0]!r} gives no answer ({error})"


CLOCKS, NEIGHBOURS = "clocks", "other processes"
"""What a driver may not tell of: on a slice of a GPU (MIG), a virtual one, or in a restricted container."""


@dataclass(frozen=True)
class Conditions:
    """The GPU's state during a measurement: clock in MHz, what throttled it, and who else used it."""

    clock: int = 0
    throttles: tuple[str, ...] = ()
    strangers: tuple[int, ...] = ()
    """Ids of processes that hold GPU memory and do not belong to this session's arms."""
    unknown: tuple[str, ...] = ()
    """What NVML does not tell: :data:`CLOCKS`, :data:`NEIGHBOURS`. The fields above then say nothing of it."""


def conditions(own: set[int], contexts: int, count: int = 1) -> Conditions:
    """The state now of the first ``count`` GPUs that CUDA programs see: the slowest clock, and what any of them says.
    ``own`` are the process ids of this session's arms and of those that wait to become one; ``contexts`` of these use
    each of the GPUs. A test that holds a model in this process, as ``fp8_model`` does, makes it one of them."""
    import pynvml

    if torch_in_use() is not None:
        own, contexts = own | {os.getpid()}, contexts + 1
    try:
        each = [_conditions(_handle(name), own, contexts) for name in visible()[:count]]
    except pynvml.NVMLError:
        each = []
    if not each:
        # As of a GPU that was lost: what the arms then say is told.
        return Conditions(unknown=(CLOCKS, NEIGHBOURS))
    return Conditions(
        clock=min(one.clock for one in each),
        throttles=tuple(dict.fromkeys(what for one in each for what in one.throttles)),
        strangers=tuple(sorted({pid for one in each for pid in one.strangers})),
        unknown=tuple(dict.fromkeys(what for one in each for what in one.unknown)),
    )


def torch_in_use() -> Any:
    """torch, where this process uses a GPU itself; or ``None``. Imports nothing."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _handle(name: str) -> Any:
    """NVML's of a GPU that ``CUDA_VISIBLE_DEVICES`` names by index or UUID."""
    import pynvml

    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)


def _conditions(handle: Any, own: set[int], contexts: int) -> Conditions:
    import pynvml

    clock, reasons, users = 0, 0, []
    unknown: tuple[str, ...] = (CLOCKS, NEIGHBOURS)
    with contextlib.suppress(pynvml.NVMLError):
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        unknown = (NEIGHBOURS,)
    with contextlib.suppress(pynvml.NVMLError):
        users = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        if users or not contexts:
            # A driver that does not list our own arms lists nobody's.
            unknown = unknown[:-1]
    throttles = tuple(word for bit, word in THROTTLES.items() if reasons & bit)
    return Conditions(clock, throttles, strangers(users, own, contexts), unknown)


def strangers(users: list[int], own: set[int], contexts: int) -> tuple[int, ...]:
    """Processes on the GPU that are not this session's. ``users``: process ids on the GPU; ``own``: those of arms and
    of processes that wait; ``contexts``: how many of these use the GPU.

    What an arm has started belongs to the arm's process session (Unsloth's arms start helpers that hold the GPU). In a
    container the driver gives other process ids than those seen here: then none of ``own`` is among ``users``, and
    ``contexts`` of them count as our own."""

    def session(pid: int) -> int:
        # 0 where there is no such process here.
        with contextlib.suppress(OSError):
            return os.getsid(pid)
        return 0

    own = own | {pid for pid in users if session(pid) in own}
    return tuple(sorted(set(users) - own) if own & set(users) else sorted(users)[contexts:])
