"""Found first on PYTHONPATH by every Python that a watched command starts. It must do nothing there but wait.

It runs the ``sitecustomize`` that it hides. Only a process that imports torch's optimizers loads the observer. It is
kept in the syntax of Python 3.6, so that an old interpreter is named instead of broken.
"""

import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(HERE))
FOLDER = os.environ.get("PYTEST_FP8_WATCH_FOLDER", "")
HOLD = "PYTEST_FP8_HOLD"
"""The variable that names the socket of a pytest that holds the script; without it the script is watched alone."""
TARGET = "torch.optim.optimizer"
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)


class Waiting:
    """A finder that finds nothing. At each import it looks whether ``TARGET`` is there, and then calls ``observe``."""

    waits = True

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        # The class comes after all that the observer takes of the module, which may still be on its way.
        if self.waits and hasattr(sys.modules.get(TARGET), "Optimizer"):
            self.waits = False
            try:
                observe(sys.modules[TARGET])
            except Exception as error:
                say("FP8-W09", "the observer did not start: {!r}".format(error))  # noqa: UP032
        return None


def observe(module: Any) -> None:
    """Have the observer start with the first step of an optimizer. ``module``: :data:`TARGET`."""
    torch = sys.modules["torch"]
    version = getattr(torch, "__version__", "0")
    if sys.version_info[:2] < OLDEST_PYTHON or tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        python = ".".join(map(str, sys.version_info[:2]))
        older = "Python {} with torch {} is older than Python 3.11 with torch 2.11".format(python, version)  # noqa: UP032
        say("FP8-W08", older)  # W.UNSUPPORTED
        return
    begun = []  # type: Any

    def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
        # Traced into a compiled step, the rest would break its graph.
        if torch.compiler.is_compiling():
            return
        if not begun:
            # Now torch is whole, which it is not yet while this module of it is imported.
            begun.append(None)
            try:
                begun[0] = observer().attach(module, FOLDER)
            except Exception as error:
                say("FP8-W09", "the observer did not start: {!r}".format(error))  # noqa: UP032
        if begun[0] is not None:
            begun[0](optimizer)

    module.register_optimizer_step_pre_hook(begins)


def observer() -> Any:
    """The observer's module, from this very folder's package: the script's Python need not have it installed."""
    import importlib
    import importlib.util

    if "pytest_fp8" not in sys.modules:
        init = os.path.join(PACKAGE, "__init__.py")
        spec = importlib.util.spec_from_file_location("pytest_fp8", init, submodule_search_locations=[PACKAGE])  # type: Any
        package = sys.modules["pytest_fp8"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module("pytest_fp8.watch." + ("held" if os.environ.get(HOLD) else "observer"))


def say(code: str, reason: str) -> None:
    """Leave a file that says why this process gives no evidence. Nothing is printed: the script's output is its own."""
    import json

    try:
        with open(os.path.join(FOLDER, "{}.json".format(os.getpid())), "w") as file:  # noqa: UP032
            json.dump({"pid": os.getpid(), "state": "failed", "code": code, "reason": reason}, file)
    except OSError:
        pass


def chain() -> None:
    """Run the ``sitecustomize`` that the others on the path would have had, whatever form it has."""
    import importlib.machinery
    import importlib.util

    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if FOLDER and os.environ.get("FP8_WATCH") != "0":
    sys.meta_path.insert(0, Waiting())
chain()
