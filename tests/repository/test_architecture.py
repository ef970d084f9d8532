"""Which module may import which: two sides of the process boundary, no circle, small files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pytest_fp8"
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted(Path(__file__).parents[1].rglob("test_*.py"))
TORCH = (
    "torch",
    "torchao",
    "transformers",
    "transformer_engine",
    "accelerate",
    "peft",
    "safetensors",
    "unsloth",
    "deepspeed",
)
WITH_TORCH = ("worker", "backends", "zoo", "watch.observer", "watch.model", "watch.held")
"""What runs in an arm's process, or in a script that is watched."""
PYTEST_S_SIDE = (
    "plugin",
    "session",
    "fixtures",
    "markers",
    "items",
    "options",
    "xdist",
    "pair",
    "compare",
    "report",
    "doctor",
    "cli",
)
NEVER = {
    "questions": ("worker", "arms", "backends", "baselines", *PYTEST_S_SIDE),
    "worker": ("arms", "baselines", "stats", *PYTEST_S_SIDE),
    "backends": ("arms", "baselines", "stats", "questions", *PYTEST_S_SIDE),
    "watch": ("arms", "baselines", "stats", "backends", "zoo", *PYTEST_S_SIDE),
    "zoo": ("arms", "baselines", "stats", "questions", "worker", *PYTEST_S_SIDE),
    "arms": ("worker", "baselines", "stats", *PYTEST_S_SIDE),
    "baselines": ("worker", "arms", "backends", "plugin", "session", "fixtures", "markers", "pair", "compare"),
}
"""Folder -> what nothing in it imports, not even for a type checker."""
ARM_S_FOLDERS = ("training", "state", "run", "record", "answers", "checkpoint")
"""Of ``worker/``: each imports only of those before it."""
CROSSES_THE_PIPE = ("arms.spec", "worker.main")
"""What an arm is to be, plain data that both sides read; and the first function of an arm's process."""
LONGEST_FUNCTION = 60
"""Lines."""


def name_of(path: Path) -> str:
    """``questions.speed.check`` of ``pytest_fp8/questions/speed/check.py``; the package itself is an empty name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(code: ast.AST) -> Iterator[str]:
    """Full names of all that code imports, also inside functions and for a type checker."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = {name_of(path): path for path in FILES}


def module_of(name: str) -> str | None:
    """The module of this package that an imported name comes from; ``None`` for other packages."""
    head, _, rest = name.partition(".")
    if head != "pytest_fp8":
        return None
    while rest not in MODULES:
        rest = rest.rpartition(".")[0]
    return rest


@cache
def needs(module: str) -> frozenset[str]:
    """The modules of this package that one imports; the package itself, which loads its names when asked, is none."""
    found = {module_of(name) for name in imported(tree(MODULES[module]))}
    return frozenset(other for other in found if other and other != module)


def within(module: str, *folders: str) -> bool:
    return any(module == folder or module.startswith(f"{folder}.") for folder in folders)


def test_torch_is_imported_on_the_arm_s_side_alone():
    where = {
        (name_of(path), getattr(statement, "name", "the module itself"))
        for path in FILES
        if not within(name_of(path), *WITH_TORCH)
        for statement in tree(path).body
        if {name.partition(".")[0] for name in imported(statement)} & set(TORCH)
    }
    assert where == set()


def test_no_module_imports_itself_through_others():
    """A circle is in what is raised."""
    TopologicalSorter({module: needs(module) for module in MODULES if module}).prepare()


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """(a module in this folder, one of this package that it imports)."""
    modules = [name for name in MODULES if within(name, folder)]
    assert modules
    yield from ((module, other) for module in modules for other in sorted(needs(module)))


def test_rules_are_pure_statistics():
    assert [each for each in imports("stats") if not within(each[1], "stats", "verdicts")] == []


@pytest.mark.parametrize("folder", NEVER)
def test_imports_go_one_way(folder):
    wrong = [each for each in imports(folder) if within(each[1], *NEVER[folder])]
    assert [each for each in wrong if each[1] not in CROSSES_THE_PIPE] == []


@pytest.mark.parametrize("folder", ARM_S_FOLDERS)
def test_each_folder_of_an_arm_builds_on_those_below_it(folder):
    above = [f"worker.{other}" for other in ARM_S_FOLDERS[ARM_S_FOLDERS.index(folder) + 1 :]]
    assert [each for each in imports(f"worker.{folder}") if within(each[1], *above)] == []


def test_an_arm_gives_evidence_and_judges_nothing():
    modules = [name for name in MODULES if within(name, "worker")]
    judges = [
        (module, name)
        for module in modules
        for name in imported(tree(MODULES[module]))
        if name.rpartition(".")[2].startswith("check_")
    ]
    assert modules
    assert judges == []


def test_a_file_says_first_what_lives_there():
    assert [path for path in FILES if not path.read_text().startswith('"""')] == []


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)]


def test_functions_are_short():
    lines = {
        (name_of(path), each.name): (each.end_lineno or 0) - each.lineno + 1
        for path in FILES
        for each in functions(path)
    }
    assert {place: count for place, count in lines.items() if count > LONGEST_FUNCTION} == {}


def test_a_test_module_imports_no_other_one():
    """What several need stands in tests/helpers."""
    names = [(path.stem, name) for path in TESTS for name in imported(tree(path))]
    assert [each for each in names if each[1].startswith(("test_", "tests."))] == []


def at_its_top(path: Path) -> Iterator[str]:
    """Full names of all that a file imports as it is imported itself."""
    for statement in tree(path).body:
        match statement:
            case ast.Import() | ast.ImportFrom():
                yield from imported(statement)
            case ast.Expr(ast.Call(call, [name, *_])) | ast.Assign(value=ast.Call(call, [name, *_])):
                if ast.unparse(call) == "pytest.importorskip":
                    yield ast.literal_eval(name)


def file_of(name: str) -> Path | None:
    """The file of this repository that an imported name comes from."""
    while name:
        for folder in (ROOT, ROOT / "tests", ROOT / "suites"):
            for end in (".py", "/__init__.py"):
                path = folder / (name.replace(".", "/") + end)
                if path.is_file():
                    return path
        name = name.rpartition(".")[0]
    return None


@cache
def loads_torch(path: Path) -> bool:
    names = list(at_its_top(path))
    files = {file_of(name) for name in names}
    return any(name.partition(".")[0] in TORCH for name in names) or any(loads_torch(file) for file in files if file)


def test_modules_that_import_torch_are_marked_as_slow():
    """Whole: the fast set would not start."""
    marked = [path for path in TESTS if "\npytestmark = pytest.mark.slow\n" in path.read_text()]
    assert [path.stem for path in TESTS if path not in marked and loads_torch(path)] == []
