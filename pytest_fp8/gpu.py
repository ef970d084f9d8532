"""The GPU of this machine, as NVML describes it: its kind, what it can do, its state and who uses it. No torch."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse

# A GPU gets the first name that fits it, for its baselines too: a family's comes last.
KINDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("gh200", "h200", "h100", "h800", "h20"), (9,)),
    **dict.fromkeys(("gb300", "gb200", "b300", "b200"), (10,)),
    "l40s": (8,),
    "hopper": (9,),
    "blackwell": (10, 12),
    "ada": (8,),
}
"""Names that ``--fp8-gpu`` takes, which stand in the driver's own -> major compute capabilities."""
FAMILIES = ("hopper", "blackwell", "ada")
"""Those of them that fit any GPU of these capabilities."""
MIG = re.compile(r"\bMIG\b")
"""In what the driver calls a slice of a GPU: ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``."""
NAMES: tuple[str, ...] = tuple(KINDS)
CHIP_OF_MAJOR = {major: family for family in FAMILIES for major in KINDS[family]}

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
    index: int = 0

    @property
    def key(self) -> str:
        """Its name in ``--fp8-gpu`` and in the baselines' folder. A slice of a GPU (MIG) is none of these kinds."""
        for name, majors in () if MIG.search(self.name) else KINDS.items():
            if self.capability[0] in majors and (name in FAMILIES or _stands_in(name, self.name)):
                return name
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "unknown"

    @property
    def chip(self) -> str:
        """hopper, blackwell or ada; empty where the GPU has no FP8 tensor cores."""
        if self.capability == (8, 9) or self.capability[0] >= 9:
            return CHIP_OF_MAJOR.get(self.capability[0], "")
        return ""

    def describe(self) -> dict[str, Any]:
        facts = asdict(self)
        del facts["index"]
        facts["capability"] = f"{self.capability[0]}.{self.capability[1]}"
        return facts


def known(name: str) -> str:
    """The declared name in lower case; raises :class:`SettingsError` for one that is not known."""
    lowered = name.strip().lower()
    if lowered not in ("auto", *NAMES):
        # Nothing near is named: an A100 is no H100.
        refuse(
            R.UNKNOWN_GPU,
            f"--fp8-gpu={name}: no GPU with FP8 of that name is known",
            expected="auto, " + ", ".join(NAMES),
            seen=name,
            next_step="nvidia-smi -L names the GPU of this machine; hopper, blackwell and ada fit any GPU of theirs",
        )
    return lowered


def is_kind(gpu: Gpu, name: str) -> bool:
    """Whether a GPU is what was declared: ``hopper`` fits any Hopper, ``h200`` an H200 alone."""
    return gpu.chip != "" and gpu.capability[0] in KINDS[name] and (name in FAMILIES or gpu.key == name)


def _stands_in(name: str, words: str) -> bool:
    return re.search(rf"\b{name}\b", words, re.IGNORECASE) is not None


def visible() -> list[str]:
    """The GPUs that a CUDA program started from here would see, in its order, each as ``CUDA_VISIBLE_DEVICES`` names
    one: by index or UUID. Empty where there are none, or NVML is not installed; without those that are lost."""
    named = _named()
    if named is not None:
        return named
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except ImportError:
        return []
    except pynvml.NVMLError:
        return []
    found = []
    for index in range(count):
        with contextlib.suppress(pynvml.NVMLError):
            # Not by index: a CUDA program of the user's counts the fastest GPU first, NVML the first on the bus.
            found.append(_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))))
    return found


def _named() -> list[str] | None:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, by index or UUID; ``None`` where it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    # CUDA stops reading at the first name that is no GPU.
    return list(takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in text.split(","))))


@lru_cache(maxsize=1)
def detect() -> tuple[Gpu | None, str]:
    """The first GPU that CUDA programs started from here would see, or ``None`` and the reason there is none.

    ``CUDA_VISIBLE_DEVICES`` is respected, as an index or a UUID.
    """
    named = _named()
    if named == []:
        return None, f"no GPU: CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides them all"
    return _described(named[0] if named else "0")


def _described(name: str) -> tuple[Gpu | None, str]:
    """The GPU of this index or UUID, or ``None`` and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "no GPU can be seen: nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        handle = _handle(name)
        called = _text(pynvml.nvmlDeviceGetName(handle))
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        power = 0.0
        with contextlib.suppress(pynvml.NVMLError):
            power = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        return Gpu(
            name=called,
            capability=(major, minor),
            memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            power_limit=power,
            index=pynvml.nvmlDeviceGetIndex(handle),
        ), ""
    except pynvml.NVMLError as error:
        by = f": CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}, {name!r}" if _named() is not None else ""
        return None, f"no NVIDIA GPU ({error}){by}"


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


def conditions(gpu: Gpu, own: set[int], contexts: int, count: int = 1) -> Conditions:
    """Read the state now; ``own`` are the process ids of this session's arms and of those that wait to become one.
    ``contexts``: how many of these use each of the GPUs.

    ``count``: of the first so many GPUs that CUDA programs see, of which ``gpu`` is the first; the slowest clock, and
    what any of them says.
    """
    import pynvml

    try:
        each = [_conditions(_handle(name), own, contexts) for name in visible()[:count]] if count > 1 else []
        if not each:
            return _conditions(pynvml.nvmlDeviceGetHandleByIndex(gpu.index), own, contexts)
    except pynvml.NVMLError:
        # As of a GPU that was lost: what the arms then say is told.
        return Conditions(unknown=(CLOCKS, NEIGHBOURS))
    return Conditions(
        clock=min(one.clock for one in each),
        throttles=tuple(dict.fromkeys(what for one in each for what in one.throttles)),
        strangers=tuple(sorted({pid for one in each for pid in one.strangers})),
        unknown=tuple(dict.fromkeys(what for one in each for what in one.unknown)),
    )


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
    return Conditions(
        clock=clock,
        throttles=tuple(word for bit, word in THROTTLES.items() if reasons & bit),
        strangers=strangers(users, own, contexts),
        unknown=unknown,
    )


def strangers(users: list[int], own: set[int], contexts: int) -> tuple[int, ...]:
    """Processes on the GPU that are not this session's. ``users``: process ids on the GPU; ``own``: those of arms and
    of processes that wait; ``contexts``: how many of these use the GPU.

    What an arm has started belongs to the arm's process session (Unsloth's arms start helpers that hold the GPU). In a
    container the driver gives other process ids than those seen here: then none of ``own`` is among ``users``, and
    ``contexts`` of them count as our own."""
    own = own | {pid for pid in users if _session_of(pid) in own}
    if users and not own & set(users):
        return tuple(sorted(users)[contexts:])
    return tuple(sorted(set(users) - own))


def _session_of(pid: int) -> int:
    """The process session that a process belongs to; each arm leads its own. 0 where there is no such process here."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
