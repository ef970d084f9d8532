"""What an arm trains: how to build the model, where batches come from, what the loss is.

The zoo's models have one ready; a user's own model needs two functions::

    @pytest.fixture(scope="session")
    def fp8_workload():
        return Workload(build=make_my_model, batch=lambda step: torch.randn(32, 128, 512))
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pytest_fp8.errors import refuse


@dataclass(frozen=True)
class Workload:
    """A user's own model. All functions run inside the arm's process, never in pytest's.

    ``build()`` gives the ``torch.nn.Module``; torch's generators are seeded before each call, and the arm moves the
    result to its device in bfloat16. ``batch(step)`` gives one batch, as a tensor or a dict, list or tuple of tensors;
    it is seeded per step too, so ``torch.randn`` inside gives every arm the same data. ``loss(model, batch)`` gives a
    scalar; without it the model is called with the batch and its result, or that result's ``.loss``, is the loss.
    ``optimizer(parameters)`` gives the optimizer; without it AdamW with ``learning_rate``, by default 1e-3 or, with
    adapters, 2e-4.

    A learning-rate schedule hangs on it as ``optimizer.scheduler``: it is then restarted, saved and loaded with it.
    ``leave``: name patterns of Linears that stay in high precision, e.g. ``"*.router"``.

    A hand-written loop comes as ``step(model, batch, optimizer, precision)``: one whole training step with everything
    in it (accumulation, clipping, evaluation now and then), which gives the step's mean loss as a tensor. ``with
    precision():`` around the forward pass is the FP8 arm's context (Transformer Engine's autocast) and nothing in the
    BF16 arm. A call of the model without gradients is its evaluation, which no speed and no memory counts. ``loss`` is
    not asked then.

    ``convert(model)`` switches FP8 on in your own way in the FP8 arm alone, in place of the backend's, and gives the
    model or nothing; ``precision()`` likewise gives a context of your own. A Linear that ``convert`` leaves though its
    size and name would allow FP8 must be in ``leave``, or the layers question fails: whether it was filtered or
    forgotten, nobody else can tell.
    """

    build: Callable[[], Any]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    step: Callable[[Any, Any, Any, Callable[[], Any]], Any] | None = None
    convert: Callable[[Any], Any] | None = None
    precision: Callable[[], Any] | None = None
    leave: tuple[str, ...] = ()
    learning_rate: float | None = None
    name: str = "own"

    def converted(self, model: Any) -> Any:
        """``model`` as this workload's own ``convert`` hands it back: a model, or nothing where it works in place."""
        assert self.convert is not None, "asked where there is one"
        given = self.convert(model)
        return model if given is None else given

    def fingerprint(self) -> str:
        """Hash of the functions' source text and of all that they refer to, for the case's hash: the same under every
        Python version. What travels by value counts by its source, and the modules that the functions stand in."""
        from pytest_fp8.fingerprint import Fingerprint

        held = list(vars(self).values())
        homes = {home for value in held if callable(value) for home in _homes(value) if not _is_installed(home)}
        own = homes | {module.__name__ for module in _unimportable_modules(self)}
        return Fingerprint(own, min(homes, default="")).text(held)[:16]

    def ship(self, asked_by: str = "") -> str:
        """The workload as text that an arm's process can rebuild.

        Functions of a test module or conftest travel by value, since the arm cannot import those. Raises
        :class:`SettingsError` naming the test, where a function holds something that cannot travel.
        """
        return ship(self, "the workload's functions", asked_by)


@dataclass(frozen=True)
class WorkloadReference:
    """A workload by name, ``package.module:attribute``: each arm imports it from its own code."""

    text: str

    def __post_init__(self) -> None:
        module, separator, attribute = self.text.partition(":")
        if not (separator and module and attribute.isidentifier()):
            refuse(
                f"{self.text!r} does not name a workload",
                expected="package.module:attribute, e.g. my_project.fp8:workload",
                seen=self.text,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return imported_workload, (self.text,)


def imported_workload(text: str) -> Workload:
    """The workload that ``package.module:attribute`` names here; called in the arm's process."""
    from importlib import import_module

    module, _, attribute = text.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, Workload):
        raise TypeError(f"{text} is a {type(found).__name__}, not a pytest_fp8.Workload")
    return found


def _home(function: Any) -> str:
    """The module that a function, a method, a callable object or what a partial calls was written in."""
    return getattr(_called(function), "__module__", None) or ""


def _homes(function: Any) -> set[str]:
    """The same, and where its code stands, if a decorator gave it another's name."""
    return {_home(function), getattr(_called(function), "__globals__", {}).get("__name__", "")}


def _called(function: Any) -> Any:
    """What is called in the end: a partial's function."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_installed(name: str) -> bool:
    """Whether a module is a library's. Installed tests are still tests."""
    origin = getattr(sys.modules.get(name), "__file__", None) or ""
    library = "-packages" in origin or name.partition(".")[0] in sys.stdlib_module_names
    return library and not _is_test_file(origin)


def _is_test_file(origin: str) -> bool:
    stem = os.path.splitext(os.path.basename(origin))[0]
    return stem == "conftest" or stem.startswith("test_")


def ship(value: Any, what: str, asked_by: str = "") -> str:
    """Any picklable value, functions included, as base64 text."""
    import cloudpickle

    local = _unimportable_modules(value)
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        return base64.b64encode(cloudpickle.dumps(value)).decode()
    except Exception as error:
        refuse(
            f"{what} cannot be sent to the arm's process" + (f" (asked by {asked_by})" if asked_by else ""),
            expected="functions that close over plain data and modules only",
            seen=f"{type(error).__name__}: {error}",
            cause="a function refers to something that lives in this process alone: an open file, a lock, a GPU "
            "tensor, a pytest fixture object",
            next_step="create it inside the function, pass its plain settings instead, or move both into a module "
            "that can be imported: what is no test file and no conftest goes by its name",
        )
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)


def identity(shipped: str) -> str:
    """Hash of all that a shipped workload carries: source and every value it holds, in closures, dicts and objects.

    Two workloads of one identity share their arms; anything in which they differ makes them two. cloudpickle draws a
    random name for each class it ships by value; these count by their order, so that a fixture which defines its model
    anew for each test still gives one workload.
    """
    from cloudpickle import cloudpickle

    drawn = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    order: dict[bytes, bytes] = {}

    def number(found: re.Match[bytes]) -> bytes:
        name = found.group()
        return order.setdefault(name, b"class %d" % len(order)) if name.decode() in drawn else name

    content = re.sub(rb"[0-9a-f]{32}", number, base64.b64decode(shipped))
    return hashlib.sha256(content).hexdigest()[:16]


def unship(text: str) -> Any:
    """The value again. Only ever called on text that this session's own parent or child process sent by pipe."""
    import cloudpickle

    return cloudpickle.loads(base64.b64decode(text))


def _unimportable_modules(value: Any) -> list[ModuleType]:
    """Modules whose functions and classes travel by value: test modules and conftests, which an arm must not import,
    and where one of the functions in ``value`` stands, if no other process could import that."""
    found = [module for name, module in list(sys.modules.items()) if _is_of_tests(name, module)]
    for function in list(vars(value).values()) if isinstance(value, Workload) else [value]:
        module = sys.modules.get(_home(function))
        if module is not None and module not in found and not _importable(module):
            found.append(module)
    return found


def _is_of_tests(name: str, module: ModuleType) -> bool:
    """Whether pytest loaded it as a test module or a conftest. A package is neither: by value, it would take all that
    is in it along."""
    held = vars(module) if isinstance(module, ModuleType) else {}
    origin = held.get("__file__")
    if origin is None or held.get("__name__") != name or "__path__" in held or "-packages" in origin:
        return False
    if name.startswith("pytest_fp8."):
        return False
    rewritten = type(held.get("__loader__")).__module__ == "_pytest.assertion.rewrite"
    return rewritten or _is_test_file(origin)


def _importable(module: ModuleType) -> bool:
    """Whether a process with this one's ``sys.path`` would find the same file under the module's name."""
    name, origin = module.__name__, getattr(module, "__file__", None)
    if name.partition(".")[0] == "pytest_fp8":
        # Each arm brings its own, wherever that is installed.
        return True
    path = None
    if "." in name:
        package = sys.modules.get(name.rpartition(".")[0])
        if package is None or not _importable(package):
            return False
        path = package.__path__
    for finder in sys.meta_path:
        if type(finder).__module__.startswith("_pytest."):
            continue
        spec = finder.find_spec(name, path)
        if spec is not None:
            return origin is None or spec.origin == origin
    return False
