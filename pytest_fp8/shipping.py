"""How functions and workloads travel to an arm's process, and which workloads are one and the same."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import io
import operator
import re
import sys
from types import CodeType, ModuleType
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse
from pytest_fp8.source_text import is_library_file, is_test_file
from pytest_fp8.zoo.batch import storage_of

ITERATOR = re.compile("generator|Iter'|iterator|itertools")
"""In what pickle says of a generator, of a DataLoader's place in its data, of ``itertools.cycle``."""
NO_FILE = "<dynamic-code>"
"""cloudpickle's name for the file of code that it sends."""


def ship(value: Any, what: str, asked_by: str = "") -> str:
    """Any picklable value, functions included, as base64 text.

    Functions of test modules and conftests travel by value, because an arm cannot import those. Raises
    :class:`SettingsError` that names ``what`` and the test ``asked_by``, where the value holds something that cannot
    be pickled.
    """
    import cloudpickle

    local = unimportable_modules(value)
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        return base64.b64encode(_pickled(value)).decode()
    except Exception as error:
        culprit = _culprit(value)
        iterates = ITERATOR.search(str(error))
        refuse(
            R.BAD_BATCH if iterates else R.CANNOT_SHIP,
            f"{what} cannot be sent to the arm's process" + (f" (asked by {asked_by})" if asked_by else ""),
            expected="functions that close over plain data and modules only",
            seen=(f"{culprit}: " if culprit else "") + f"{type(error).__name__}: {error}",
            cause="a function refers to an iterator, which gives each of its batches once: every arm asks for the same "
            "steps, more than once"
            if iterates
            else "a function refers to something that lives in this process alone: an open file, a lock, a GPU "
            "tensor, a pytest fixture object, a function that torch.compile made",
        )
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)


def _culprit(workload: Any) -> str:
    """The fields of a workload that cannot be sent, with the variables that their functions refer to: ``batch, which
    refers to lock``. Empty where none is known."""
    fields = dataclasses.fields(workload) if dataclasses.is_dataclass(workload) else ()
    found = []
    for name, value in ((field.name, getattr(workload, field.name)) for field in fields):
        if _can_be_pickled(value):
            continue
        variables: dict[str, Any] = {}
        # A variable that a function closes over and that has no value yet is a ValueError; a callable object has none.
        with contextlib.suppress(ValueError, TypeError):
            told = inspect.getclosurevars(_innermost(value))
            variables = {**told.globals, **told.nonlocals}
        culprits = [name for name, held in variables.items() if not _can_be_pickled(held)]
        found.append(f"{name}, which refers to {', '.join(culprits)}" if culprits else name)
    return "; ".join(found)


def _can_be_pickled(value: Any) -> bool:
    try:
        _pickled(value)
    except Exception:
        return False
    return True


def _pickled(value: Any) -> bytes:
    """cloudpickle's bytes, the same for equal values; modules of a class of their own, too, go by their name, and code
    keeps the name of its file.

    cloudpickle sends such a module by its content, which cannot be pickled. ``torch.backends.cudnn`` is one, and goes
    along with each function that mentions it. torch's own way to pickle a storage has its address among the bytes, and
    a class of ``torch.autograd.Function`` has the number of such classes. From 3.1.3 on cloudpickle calls every file
    ``<dynamic-code>``: an error in an arm would show no line of the user's, and ``inspect.getsource()`` fail there.
    """
    import cloudpickle

    torch = sys.modules.get("torch")
    storages: dict[tuple[int, int, Any], Any] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, held: Any) -> Any:
            if isinstance(held, CodeType) and held.co_filename != NO_FILE:
                of_file = operator.methodcaller("replace", co_filename=held.co_filename)
                return of_file, (held.replace(co_filename=NO_FILE),)
            if isinstance(held, ModuleType) and type(held) is not ModuleType:
                for name, module in list(sys.modules.items()):
                    if module is held:
                        return importlib.import_module, (name,)
            if isinstance(held, ModuleType) and held.__name__ in cloudpickle.list_registry_pickle_by_value():
                # Its loader is pytest's own, and holds the session.
                without = {"__builtins__", "__loader__", "__spec__"}
                content = {name: value for name, value in vars(held).items() if name not in without}
                return cloudpickle.cloudpickle.dynamic_subimport, (held.__name__, content)
            if torch is not None and type(held) in (torch.storage.TypedStorage, torch.UntypedStorage):
                # Public attributes of the first warn that the class will go. Tensors of float8 say that they have the
                # second one, and are made again from the first, of bytes.
                untyped, dtype = getattr(held, "_untyped_storage", held), getattr(held, "dtype", torch.uint8)
                if untyped.device.type == "cpu":
                    # Each view has a storage object of its own: batches that were split off one tensor would
                    # each carry all of it.
                    first = storages.setdefault((untyped.data_ptr(), untyped.nbytes(), dtype), held)
                    if first is not held and untyped.nbytes():
                        return operator.itemgetter(0), ((first,),)
                    content = torch.empty(0, dtype=torch.uint8).set_(untyped).numpy().tobytes()
                    return storage_of, (content, dtype)
            # torch's own names: each class of torch.autograd.Function has another, which is numbered.
            if isinstance(held, type) and "_forward_cls" in vars(held):
                return getattr, (vars(held)["_forward_cls"], "_backward_cls")
            return super().reducer_override(held)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def identity(shipped: str) -> str:
    """Hash of a shipped workload: the source and every value that its functions hold.

    Arms are shared only between workloads of one identity, random values included. cloudpickle draws a random name for
    each class that travels by value. Such names count by their order, so that a fixture which defines its model anew
    for each test still gives one workload.
    """
    from cloudpickle import cloudpickle

    # cloudpickle's names of classes. A pickler that may be given the names would replace it.
    drawn = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    order: dict[bytes, bytes] = {}

    def number(found: re.Match[bytes]) -> bytes:
        name = found.group()
        return order.setdefault(name, b"class %d" % len(order)) if name.decode() in drawn else name

    content = re.sub(rb"[0-9a-f]{32}", number, base64.b64decode(shipped))
    return hashlib.sha256(content).hexdigest()[:16]


def unship(text: str) -> Any:
    """The value that :func:`ship` made a text of. Only for text that this process's own parent or child sent by pipe,
    since unpickling runs code."""
    import cloudpickle

    return cloudpickle.loads(base64.b64decode(text))


def unship_in_arm(text: str) -> Any:
    """The same in an arm, where pickle then finds the classes that came by value under their names: ``torch.save``
    stores objects of them, and a DataLoader's workers give them back in batches."""
    from cloudpickle import cloudpickle

    # The classes that came by value. A hook of cloudpickle's for each class that it makes would replace it.
    tracked = getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    before = set(tracked)
    value = unship(text)
    for held in [held for name, held in list(tracked.items()) if name not in before]:
        if held.__name__ != held.__qualname__:
            # Made in a function: pickle finds it nowhere. One in a class comes with that.
            continue
        stand_in = sys.modules.setdefault(held.__module__, _ShippedModule(held.__module__))
        if isinstance(stand_in, _ShippedModule):
            setattr(stand_in, held.__name__, held)
    return value


class _ShippedModule(ModuleType):
    """Stands for a test file in an arm, with its classes that came by value. Whatever else is asked of it, as by an
    import inside a function, is the file's own."""

    _own: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._own is None:
            del sys.modules[self.__name__]
            try:
                self._own = importlib.import_module(self.__name__)
            except ImportError as error:
                raise AttributeError(f"{name} of {self.__name__}, in an arm: {error}") from error
            finally:
                sys.modules[self.__name__] = self
        return getattr(self._own, name)


def unimportable_modules(value: Any) -> list[ModuleType]:
    """Modules whose functions and classes travel by value: test modules and conftests, which an arm must not import,
    and the modules of ``value`` and of a dataclass's fields, if another process cannot import them."""
    found = [module for name, module in list(sys.modules.items()) if _is_of_tests(name, module)]
    # A dataclass with slots has no __dict__.
    held_by = getattr(value, "__dict__", {}).values() if dataclasses.is_dataclass(value) else ()
    for held in [value, *held_by]:
        module = sys.modules.get(_home(held))
        if module is not None and module not in found and not _importable(module):
            found.append(module)
    return found


def _home(function: Any) -> str:
    """The module that a function, a method, a callable object or a partial's function was written in."""
    return getattr(_innermost(function), "__module__", None) or ""


def _innermost(function: Any) -> Any:
    """A partial's function; any other as it is."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_of_tests(name: str, module: ModuleType) -> bool:
    """Whether pytest loaded a module as a test module or a conftest. A package is neither: it would travel with all
    modules in it."""
    held = vars(module) if isinstance(module, ModuleType) else {}
    origin = held.get("__file__")
    if origin is None or held.get("__name__") != name or "__path__" in held:
        return False
    rewritten = type(held.get("__loader__")).__module__ == "_pytest.assertion.rewrite"
    return not is_library_file(origin) and (rewritten or is_test_file(origin))


def _importable(module: ModuleType) -> bool:
    """Whether a process with this one's ``sys.path`` would find the same file under the module's name."""
    name, origin = module.__name__, getattr(module, "__file__", None)
    above = name.rpartition(".")[0]
    if name.partition(".")[0] == "pytest_fp8":
        # Each arm imports pytest-fp8 from its own environment.
        return True
    package = sys.modules.get(above)
    if above and (package is None or not _importable(package)):
        return False
    path = package.__path__ if package is not None else None
    finders = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest.")]
    spec = next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)
    return spec is not None and origin in (None, spec.origin)
