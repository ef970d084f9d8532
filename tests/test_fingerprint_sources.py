"""The hash of an own model's case on whole modules: edits that it must see, and differences that are none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.fingerprint_edits import EDITS, TORCH_EDITS

ROOT = Path(__file__).parent.parent
END = """
def batch(step): return step
def workload(): return Workload(build=build, batch=batch)
"""


def mark(folder, source, name="test_made"):
    """The hash of the workload of a module with that source."""
    path = folder / f"{name}.py"
    folder.mkdir(exist_ok=True)
    path.write_text("from pytest_fp8 import Workload\n" + textwrap.dedent(source) + END)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not through a compiled file, which an edit of the same size within the same second does not outdate.
        exec(compile(path.read_text(), path, "exec"), vars(module))
        return module.workload().fingerprint()
    finally:
        del sys.modules[name]


@pytest.mark.parametrize("source", EDITS.values(), ids=EDITS)
def test_an_edit_is_seen(tmp_path, source):
    before = mark(tmp_path, source.replace("@@", "2"))
    assert before == mark(tmp_path, source.replace("@@", "2"))
    assert before != mark(tmp_path, source.replace("@@", "3"))


@pytest.mark.parametrize("source", TORCH_EDITS.values(), ids=TORCH_EDITS)
def test_an_edit_of_what_torch_holds_is_seen(tmp_path, source):
    pytest.importorskip("torch")
    test_an_edit_is_seen(tmp_path, source)


HOSTILE = {
    "a property that fails": "@property\n    def shape(self): raise RuntimeError('not built yet')",
    "any attribute fails": "def __getattr__(self, name): raise KeyError(name)",
    "a text that fails": "def __repr__(self): raise RuntimeError('no text')",
    "a class that it is not": "@property\n    def __class__(self): raise RuntimeError('no class')",
    "a truth that fails": "def __bool__(self): raise OSError\n    def __eq__(self, other): raise OSError",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_no_code_of_a_value_s_own_is_run(tmp_path, body):
    source = f"class Held:\n    {body}\nHELD = [Held(), {{1: Held()}}]\ndef build(): return HELD\n"
    assert mark(tmp_path, source) == mark(tmp_path, source)


def test_neither_a_mapping_without_end_nor_a_lazy_layer_nor_a_long_chain_stops_it(tmp_path):
    source = """
        import collections.abc, itertools
        class Endless(collections.abc.Mapping):
            def __getitem__(self, key): return key
            def __len__(self): return 1
            def __iter__(self): return itertools.count()
        class Link: ...
        chain = Link()
        for _ in range(2000):
            link = Link()
            link.next = chain
            chain = link
        BIG = 10 ** 5000
        ENDLESS = Endless()
        def build(): return ENDLESS, chain, BIG"""
    assert mark(tmp_path, source) == mark(tmp_path, source)
    torch = pytest.importorskip("torch")
    assert torch
    lazy = "import torch\nM = torch.nn.LazyLinear(3)\ndef build(): return M\n"
    assert mark(tmp_path, lazy) == mark(tmp_path, lazy)


def test_neither_is_an_installed_library_s_source(tmp_path, monkeypatch):
    library = tmp_path / "site-packages"
    library.mkdir()
    monkeypatch.syspath_prepend(str(library))
    source = "import functools, installed_net\nbuild = functools.partial(installed_net.Net, 64)\n"

    def with_library(text):
        (library / "installed_net.py").write_text(f"class Net:\n    def f(self): return {text}\n")
        sys.modules.pop("installed_net", None)
        importlib.invalidate_caches()
        return mark(tmp_path, source)

    try:
        assert with_library("1") == with_library("22")
    finally:
        sys.modules.pop("installed_net", None)


def test_a_checkout_may_lie_anywhere(tmp_path):
    source = """
        from pathlib import Path
        import os
        HERE = Path(__file__).parent / "data"
        TEXT = os.path.join(os.path.dirname(__file__), "vocab.json")
        def build(): return HERE, TEXT, Path(__file__).parent, @@"""
    one, two = source.replace("@@", "1"), source.replace("@@", "HERE")
    assert mark(tmp_path / "here", one) == mark(tmp_path / "there", one)
    assert mark(tmp_path / "here", one) != mark(tmp_path / "here", two)
    assert mark(tmp_path / "here", one) != mark(tmp_path / "here", one.replace('"data"', '"other"'))


# String hashes, which order sets, memory addresses, compiled files, pytest's rewriting, and two Pythons.
SPREAD = """
import collections, dataclasses, functools, typing
from types import SimpleNamespace
from pytest_fp8 import Workload

@dataclasses.dataclass(frozen=True)
class Node:
    name: str
    next: list = dataclasses.field(default_factory=list, hash=False, compare=False)

one, two, three = Node("one"), Node("two"), Node("three")
one.next.append(two), two.next.append(three), three.next.append(one)

class Encoder:
    def other(self): return Decoder
class Decoder:
    def other(self): return Encoder, Third
class Third:
    def other(self): return Encoder

class Held(typing.Protocol):
    def f(self): ...

class Settings(typing.NamedTuple):
    names: tuple = ("a", "b")

NAMES = SimpleNamespace(names={"alpha", "beta", "gamma", "delta"}, deep=[{"x", "y", "z"}])
QUEUE = collections.deque([{"alpha", "beta", "gamma"}])
POLICY, RING = {Encoder, Decoder, Third}, {one, two, three}

def pick(a, b, c=None): return b

LOSS = pick([1,
    2], lambda m, b: (m,
    b))

def build(x=1):
    assert x == 1, "rewritten by pytest"
    return NAMES, QUEUE, POLICY, RING, Held, Settings, LOSS, [Held for _ in POLICY]

def batch(step): return step

def workload():
    return Workload(build=build, batch=batch, loss=lambda m, b: dict(
        a=1, b=[2,
        3]))

def test_says():
    print("MARK", workload().fingerprint())

if __name__ == "__main__":
    test_says()
"""
EXPECTED = "030ca742b54612ef"


def test_it_is_the_same_in_every_process(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "test_spread.py").write_text(SPREAD)

    def run(seed, *how):
        done = subprocess.run(
            [sys.executable, *how],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        return next(line.split()[-1] for line in done.stdout.splitlines() if "MARK" in line)

    say = "import test_spread; test_spread.test_says()"
    pytest_ = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_spread.py")
    marks = [run("1", "-c", say), run("2", "-c", say), run("3", *pytest_), run("4", *pytest_, "--assert=plain")]
    assert set(marks) == {EXPECTED}, marks
