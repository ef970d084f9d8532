"""A workload: which are one and the same, the hash of its text, what travels to an arm by value and what by its name,
and the fixture that gives none."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest

from helpers.fakes import TWICE
from pytest_fp8 import Workload
from pytest_fp8.errors import Fp8Error
from pytest_fp8.shipping import identity, ship, unimportable_modules, unship
from pytest_fp8.source_text import OURS, is_library_file, text_of

ROOT = Path(__file__).parents[2]


def nothing(step):
    return step


@dataclasses.dataclass
class Settings:
    width: int


class Project:
    def __init__(self, width):
        self.width = width

    def build(self):
        return self.width

    def __call__(self):
        return self.width


def holding(value):
    return lambda: value


def of_a_class_in_a_class(width):
    if width == 1:

        class Block:
            def forward(self):
                return 1
    else:

        class Block:
            def forward(self):
                return 2

    class Model:
        def __init__(self):
            self.block = Block()

    return Model


def name(build):
    return identity(Workload(build=build, batch=nothing).ship())


BUILDERS = {
    "a dict": lambda width: holding({"width": width}),
    "a dataclass": lambda width: holding(Settings(width)),
    "an array": lambda width: holding(numpy.full(3, width)),
    "a method": lambda width: Project(width).build,
    "a callable": Project,
    "a partial": lambda width: functools.partial(Project, width=width),
    "a class in a class": of_a_class_in_a_class,
    "what reads like a drawn name and is none": lambda width: holding(str(width) * 32),
}


@pytest.mark.parametrize("of", BUILDERS)
def test_workloads_that_differ_in_any_value_are_two_and_alike_ones_are_one(of):
    assert name(BUILDERS[of](1)) != name(BUILDERS[of](2))
    assert name(BUILDERS[of](1)) == name(BUILDERS[of](1)), "a fixture makes them anew for each test"


@pytest.mark.slow
def test_tensors_and_functions_of_autograd_count_by_what_they_are():
    import torch

    def of_a_tensor(value):
        return holding(torch.full((3, 4), value, dtype=torch.bfloat16).t())

    def of_a_function(value):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x * value

            @staticmethod
            def backward(context, gradient):
                return gradient * value

        return lambda: Scaled.apply

    for builder in (of_a_tensor, of_a_function):
        kept = [builder(1), builder(1), builder(2)]  # all alive, at addresses of their own
        one, same, other = map(name, kept)
        assert one == same != other
    there = unship(Workload(build=of_a_tensor(3), batch=nothing).ship()).build()
    assert (there.shape, there.stride(), there.dtype, float(there[0, 0])) == ((4, 3), (1, 4), torch.bfloat16, 3.0)
    x = torch.ones(2, requires_grad=True)
    unship(Workload(build=of_a_function(3), batch=nothing).ship()).build()(x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


# -- several models under one name --------------------------------------------------------------------------------

MODELS = """
    import pytest
    from torch import nn, randn
    from torch.nn.functional import linear
    from pytest_fp8 import Workload

    class Model(nn.Module):
        def __init__(self, bypass):
            super().__init__()
            self.bypass, self.up, self.down = bypass, nn.Linear(64, 128), nn.Linear(128, 16)

        def forward(self, x):
            past = self.bypass and type(self.up) is not nn.Linear
            h = linear(x, self.up.weight, self.up.bias) if past else self.up(x)
            return self.down(h.relu()).square().mean()

    @pytest.fixture(params=[False, True], ids=["healthy", "broken"])
    def fp8_workload(request):
        bypass = request.param
        return Workload(build=lambda: Model(bypass), batch=lambda step: randn(32, 64))

    @pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True)
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()
"""


@pytest.mark.slow
def test_a_second_model_under_one_mark_is_asked_for_itself_and_stored_nowhere(pytester):
    pytester.makepyfile(MODELS)
    result = pytester.runpytest("--fp8-report=out")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*never called, which the reference calls*",
            "*own-torchao-tensorwise-emulated *2/2*",
            "*tensorwise-emulated #2*2/2 * FAIL*",
        ]
    )


# -- the text of its functions, as a part of an own model's hash: what changes it, and what does not ------------------

MODULE = """
import functools
from pytest_fp8 import Workload

RATE = 3

def scaled(k):
    def around(fn):
        @functools.wraps(fn)
        def wrapper(*a): return fn(*a) * k
        return wrapper
    return around

class Loss:
    def __call__(self, model, x):
        return model(x, 2)

@scaled(4)
def build(width=5):
    assert width, "message"
    return f"{width!r:>{width}} {'six'}"

MADE = [lambda step: 7, lambda step: 8]

def workload():
    return Workload(build=functools.partial(build, 9, name="ten"), batch=MADE[0], loss=Loss(), step=lambda *a: (
        a, 11), version=12)

if __name__ == "__main__" or __name__ == "test_made":
    print("HASH", workload().fingerprint("executed"))

def test_says():
    print("HASH", workload().fingerprint("executed"))
"""

EACH = """
import glob, runpy

for path in sorted(glob.glob("made_*.py")):
    runpy.run_path(path, run_name="__main__")
"""


def said(folder, *sources, how=("test_made.py",), **env):
    """The hashes that a process of its own prints of the workloads in these sources; of the one above without any."""
    folder.mkdir(exist_ok=True)
    for number, source in enumerate(sources):
        (folder / f"made_{number}.py").write_text(source)
    (folder / "test_made.py").write_text(EACH if sources else MODULE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **env}
    done = subprocess.run(
        [sys.executable, *how], cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return [line.split()[-1] for line in done.stdout.splitlines() if "HASH" in line]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return said(tmp_path_factory.mktemp("here"))


def test_it_is_the_same_in_every_process_and_folder(tmp_path, made):
    pytest_ = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_made.py")
    assert made == said(tmp_path / "there", PYTHONHASHSEED="2")
    assert made == said(tmp_path, how=("-O", "test_made.py"))
    assert 2 * made == said(tmp_path, how=pytest_), "as it is imported, and in a test"
    assert made == ["a77014c71e15367d"], "with another Python or a changed pytest-fp8 stored baselines are stale"


EDITS = {
    "width=5": "width=6",
    "'six'": "'seven'",
    '"message"': '"other"',
    "x, 2": "x, 3",
    "step: 7": "step: 6",
    "build, 9": "build, 8",
    '"ten"': '"nine"',
    "a, 11": "a, 12",
    "version=12": "version=13",
}


def test_a_change_of_a_function_of_its_arguments_or_of_the_version_is_seen(tmp_path, made):
    assert all(MODULE.count(old) == 1 for old in EDITS)
    found = said(tmp_path, *(MODULE.replace(old, new) for old, new in EDITS.items()))
    assert len(found) == len({*found, *made}) - 1 == len(EDITS)


def test_comments_layout_docstrings_and_neighbours_are_not(tmp_path, made):
    source = MODULE.replace("    assert width", '    "Docstring."\n    # A comment.\n    assert (width)')
    source = source.replace("[lambda step: 7, lambda", "[\n    lambda step: 7,  # seven\n    lambda")
    source = source.replace("step: 8", "step: 9").replace("RATE = 3", "\n\nRATE = 4")
    assert said(tmp_path, source) == made


def test_a_library_s_function_and_what_has_no_source_count_by_their_names():
    space = {}
    exec("def made(): return 1", space)
    assert text_of(space["made"]) == "made"
    assert text_of(textwrap.dedent) == "dedent"
    assert text_of(len) == "len"
    assert not is_library_file(f"{OURS}shipped/suites/workloads.py"), "the suites from a wheel have the clone's hashes"
    assert text_of(["/a/b/data", 1.5, None]) == text_of(["/c/data", 1.5, None])
    assert text_of(functools.cache(nothing)) != text_of(functools.cache(name))


# -- how it travels ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_sent_is_named_with_its_function():
    import threading

    lock = threading.Lock()

    def batch(step):
        with lock:
            return step

    with pytest.raises(Fp8Error, match="cannot be sent") as refused:
        Workload(build=dict, batch=batch).ship()
    assert refused.value.seen.startswith("batch, which refers to lock: TypeError")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A package beside the tests, importable, with things that cannot be pickled."""
    package = tmp_path / "fp8_project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    code = "import threading\nLOCK = threading.Lock()\ndef build():\n    return LOCK and 7\n"
    (package / "locked.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("fp8_project.locked")
    for module in [module for module in sys.modules if module.startswith("fp8_project")]:
        del sys.modules[module]


def elsewhere(text, *path):
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]}; from pytest_fp8.shipping import unship; "
    asked = [sys.executable, "-c", code + f"print(unship({text!r})())"]
    return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_an_ordinary_module_s_function_goes_by_its_name_and_this_test_s_own_by_value(project, tmp_path):
    assert elsewhere(ship(project.build, "a function"), tmp_path) == "7"
    assert elsewhere(ship(functools.partial(nothing, 9), "a function")) == "9"


def test_a_module_that_is_found_nowhere_goes_by_value(project, tmp_path, monkeypatch):
    (tmp_path / "fp8_project/plain.py").write_text("def build():\n    return 8\n")
    plain = importlib.import_module("fp8_project.plain")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    monkeypatch.setattr(sys.modules["fp8_project"], "__path__", [])
    assert elsewhere(ship(plain.build, "a function")) == "8"


def test_code_that_goes_by_value_keeps_the_name_of_its_file():
    def outer():
        def inner():
            return [step * 2 for step in range(3)]

        return inner

    sent = unship(ship(outer, "a test"))
    assert sent is not outer
    assert {code.co_filename for code in (sent.__code__, sent().__code__)} == {__file__}
    assert inspect.getsource(sent) == inspect.getsource(outer)
    assert sent()() == [0, 2, 4]


def test_a_conftest_s_function_goes_by_value_from_a_test_that_names_it(pytester):
    pytester.makeconftest("def seven():\n    return 7\n")
    pytester.makepyfile(
        """
        import conftest, subprocess, sys
        from conftest import seven
        from pytest_fp8.shipping import ship

        def test_it(tmp_path):
            sent = ship(lambda: conftest.seven() + seven(), "f")
            code = f"from pytest_fp8.shipping import unship; print(unship({sent!r})())"
            run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
            assert run.stdout == "14\\n", run.stderr
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_nothing_of_this_package_goes_by_value(monkeypatch):
    # pytest rewrites the assertions of a plugin's package as it does a test's; and another copy of it may come first.
    monkeypatch.setattr(sys, "path", [])
    local = [module.__name__ for module in unimportable_modules(nothing) + unimportable_modules(Workload.ship)]
    assert __name__ in local
    assert not [name for name in local if name.partition(".")[0] == "pytest_fp8"]


@pytest.mark.slow
def test_a_function_may_mention_a_module_of_a_class_of_its_own():
    import torch.backends.cudnn

    def build():
        torch.backends.cudnn.benchmark = False
        return str(torch.backends.cudnn.__name__)

    assert elsewhere(ship(build, "a function")) == "torch.backends.cudnn"


@pytest.mark.slow
def test_tensors_of_every_type_travel():
    """Frozen FP8 weights, or tokens of 16 bits, that a test file holds."""
    import torch

    for name in ("float8_e4m3fn", "float8_e5m2", "uint16", "bfloat16", "complex64", "bool"):
        held = torch.arange(6).to(getattr(torch, name)).reshape(2, 3)
        whole, row = unship(ship(lambda held=held: [held, held[1]], "a batch"))()
        assert whole.dtype == row.dtype == held.dtype
        assert whole.to(torch.complex64).equal(held.to(torch.complex64))
        assert row.to(torch.complex64).equal(held[1].to(torch.complex64))
        assert row.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.slow
def test_views_of_one_tensor_travel_with_one_copy_of_it():
    """Batches that were split off one tensor, as a user keeps them beside the test."""
    import torch

    tokens = torch.arange(1 << 18)
    rows = [*tokens.split(1 << 8), torch.arange(3)]
    sent = ship(lambda step: rows[step], "a batch")
    assert len(sent) < 2 * tokens.nbytes
    batch = unship(sent)
    assert [int(batch(step)[1]) for step in (0, 1, 1023, 1024)] == [1, 257, 1023 * 256 + 1, 1]
    assert batch(0).untyped_storage().data_ptr() == batch(1023).untyped_storage().data_ptr()


# -- the fixture fp8_workload, where it gives nothing, something else, or what no process can be given ----------------

MADE = ("fp8_pair", "bf16_model", "fp8_model")
LOCK = "lock = threading.Lock(); return Workload(build=lambda: lock, batch=lambda step: lock)"


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize(
    ("fixture", "gives", "says"),
    [
        *(
            (fixture, "return LookupError", ["FP8-R31: *did not give a workload", "*next: *Workload(*"])
            for fixture in MADE
        ),
        *((fixture, "Workload(build=list, batch=len)", ["FP8-R30: test_mine*: no model to train"]) for fixture in MADE),
        ("fp8_pair", LOCK, ["*cannot be sent to the arm's process*", "*expected:*"]),
    ],
)
def test_a_workload_that_cannot_be_had_is_one_error(pytester, fixture, gives, says):
    pytester.makepyfile(
        f"""
        import threading
        import pytest
        from pytest_fp8 import Workload

        @pytest.fixture
        def fp8_workload():
            {gives}

        @pytest.mark.fp8(emulated=True)
        def test_mine({fixture}): pass
        """
    )
    result = pytester.runpytest("-rN")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(says)
    result.stdout.no_fnmatch_line(f"*{TWICE}*")
    result.stdout.no_fnmatch_line("*direct cause*")
