"""pytest-fp8: evidence that FP8 training runs, is faster, stays right and can be switched back.

Public names are loaded when first used; importing this package loads neither torch nor numpy.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fp8.case import Case as Case
    from pytest_fp8.errors import ArmError as ArmError
    from pytest_fp8.errors import BaselineError as BaselineError
    from pytest_fp8.errors import CheckFailed as CheckFailed
    from pytest_fp8.errors import Fp8Error as Fp8Error
    from pytest_fp8.errors import SettingsError as SettingsError
    from pytest_fp8.pair import Fp8Pair as Fp8Pair
    from pytest_fp8.verdicts import Decision as Decision
    from pytest_fp8.verdicts import Verdict as Verdict
    from pytest_fp8.worker.training.recompute import recompute_with as recompute_with
    from pytest_fp8.workload import Workload as Workload
    from pytest_fp8.zoo.batch import pad_to_multiple as pad_to_multiple

_HOMES = {
    "Case": "case",
    "ArmError": "errors",
    "BaselineError": "errors",
    "CheckFailed": "errors",
    "Fp8Error": "errors",
    "SettingsError": "errors",
    "Decision": "verdicts",
    "Verdict": "verdicts",
    "Fp8Pair": "pair",
    "pad_to_multiple": "zoo.batch",
    "recompute_with": "worker.training.recompute",
    "Workload": "workload",
}
__all__ = [
    "ArmError",
    "BaselineError",
    "Case",
    "CheckFailed",
    "Decision",
    "Fp8Error",
    "Fp8Pair",
    "SettingsError",
    "Verdict",
    "Workload",
    "pad_to_multiple",
    "recompute_with",
]


class _Unrewritten:
    """Finds this package's modules as Python itself does, ahead of pytest.

    pytest rewrites the assertions of each plugin's modules and keeps the result beside them. Where it cannot keep it
    (``PYTHONDONTWRITEBYTECODE=1``, a read-only installation), it does so anew in each start, which cost 30 ms.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path, target) if name.startswith(f"{__name__}.") else None


if any(type(finder).__module__ == "_pytest.assertion.rewrite" for finder in sys.meta_path):
    sys.meta_path.insert(0, _Unrewritten)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
