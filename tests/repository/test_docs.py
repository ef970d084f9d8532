"""The README and the pages of docs/: what they show can be run, and what they name exists."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import pytest

from benchmarks import results
from pytest_fp8 import Case, Fp8Pair, Workload
from pytest_fp8.baselines.store import read_folder, readable
from pytest_fp8.cli import parser
from pytest_fp8.markers import ARGUMENTS, LISTED
from pytest_fp8.options import add_options

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path for path in sorted((ROOT / "docs").glob("*.md"))}
TEXTS = {**PAGES, **{name: ROOT / name for name in ("README.md", "CONTRIBUTING.md")}}
TOOLS = ("pytest", "pytest-fp8", "tox", "python", ".ci/run")

every_text = pytest.mark.parametrize("name", TEXTS)


def prose(name):
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", TEXTS[name].read_text(), flags=re.MULTILINE | re.DOTALL)


def blocks(name, language):
    """(the line above, the code) of each fenced block."""
    return re.findall(rf"^([^\n]*)\n```{language}\n(.*?)^```$", TEXTS[name].read_text(), re.MULTILINE | re.DOTALL)


@cache
def commands(name):
    """The commands of the shell blocks and of the inline code, as argument lists."""
    lines = [line for _, block in blocks(name, "sh") for line in block.splitlines()]
    lines += [line.partition("run: ")[2] for _, block in blocks(name, "yaml") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose(name).replace("\\|", "|"))
    found = [command for line in lines for command in re.split(r" && | > ", line) if command.split(" ")[0] in TOOLS]
    words = [shlex.split(command, comments=True) for command in found]
    return [each for each in words if len(each) > 1 or each[:1] == [".ci/run"]]


def every_command(*start):
    """One parameter for each command that begins with these words."""
    shown = {" ".join(words): words for name in TEXTS for words in commands(name)}
    return [pytest.param(words, id=text) for text, words in shown.items() if words[: len(start)] == list(start)]


def test_the_readme_is_a_door():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    headings = re.findall(r"^## (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert headings[:3] == ["Install", "Your script, as it is", "A first test"]


def test_the_address_of_the_repository_stands_in_one_place():
    """Nothing that a reader types may depend on it."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"].removeprefix("https://")
    texts = [*TEXTS.values(), *(ROOT / "docs/templates").iterdir(), *(ROOT / "examples").rglob("*.py")]
    assert [path.name for path in texts if address in path.read_text()] == []


def test_the_navigation_lists_every_page_once():
    import yaml

    def pages(entries):
        for entry in entries:
            for value in entry.values():
                yield from pages(value) if isinstance(value, list) else [value]

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(PAGES)


@every_text
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(name)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (TEXTS[name].parent / file) if file else TEXTS[name]
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), target


@every_text
def test_files_named_exist(name):
    """But for those of a reader's own project, and for what is made."""
    named = re.findall(r"`((?:pytest_fp8|suites|benchmarks|examples|tests|docs|baselines|\.ci)/[\w./-]*)`", prose(name))
    assert [path for path in named if not (ROOT / path).exists()] == []


def anchors(path):
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}


# -- commands -----------------------------------------------------------------------------------------------------


def options():
    """pytest's parser with this plugin's options alone, and their flags."""
    parser = pytest.Parser(_ispytest=True)
    add_options(parser)
    [group] = [group for group in parser._groups if group.name == "fp8"]
    return parser, [flag for option in group.options for flag in option.names()]


@pytest.mark.parametrize("words", [*every_command("pytest"), *every_command("pytest-fp8", "suites")])
def test_pytest_takes_the_options_shown(words):
    known = set(options()[1])
    for word in words[1:]:
        flag = word.partition("=")[0]
        assert not flag.startswith("--fp8") or flag in known
        assert not flag.startswith("--") or flag.startswith("--fp8") or flag in pytest_help()
        if word.startswith(("suites", "tests")) and word != "tests/test_fp8.py":
            assert (ROOT / word).exists(), word


def test_the_groups_of_the_suite_are_those_shown():
    from matrix import GROUPS

    assert set(re.findall(r"-m (\w+)", PAGES["ci.md"].read_text())) == {*GROUPS, "nightly"}


@cache
def pytest_help():
    return subprocess.check_output([sys.executable, "-m", "pytest", "--help"], text=True, cwd=ROOT / "tests")


@pytest.mark.parametrize("words", every_command("pytest-fp8"))
def test_the_command_line_takes_the_arguments_shown(words):
    if len(words) == 2 and words[1] not in ("suites", "selftest"):
        # A text speaks of the command by its name alone. These two pass --help on to pytest.
        with pytest.raises(SystemExit, match=r"^0$"):
            parser().parse_args([*words[1:], "--help"])
    else:
        parser().parse_args(words[1:])


@pytest.mark.parametrize("words", every_command("tox"))
def test_tox_has_the_environments_shown(words):
    ini = ConfigParser()
    ini.read(ROOT / "tox.ini")
    assert words[1] == "-e"
    assert ini.has_section(f"testenv:{words[2]}")


@pytest.mark.parametrize("words", every_command("python"))
def test_the_programs_shown_exist_with_their_options(words):
    if words[1:] == ["-m", "build"] or words[1] == "-c":
        return
    name = words[2].replace(".", "/") if words[1] == "-m" else words[1].removesuffix(".py")
    places = [ROOT / f"{name}.py", ROOT / name / "__main__.py", ROOT / f"examples/tutorial/{name}.py"]
    script = next(path for path in places if path.is_file())
    code = "\n".join(path.read_text() for path in script.parent.glob("*.py"))
    assert [word for word in words[3:] if word.startswith("-") and f'"{word}"' not in code] == []


def test_continuous_integration_calls_the_commands_of_the_readme():
    run = (ROOT / ".ci/run").read_text()
    assert {" ".join(words) for words in commands("README.md") if words[0] == "tox"} <= set(run.splitlines())


@every_text
def test_settings_and_methods_named_exist(name):
    text = TEXTS[name].read_text()
    assert not re.findall(r"PYTEST_FP8_\w+", text), "no setting is read from a variable"
    for method in re.findall(r"\bassert_\w+(?=\()", text):
        assert hasattr(Fp8Pair, method), method
    for arguments in re.findall(r"Workload\((\w+)=", text):
        assert arguments in Workload.__dataclass_fields__, arguments


def test_the_options_page_lists_every_option():
    """Those of the help, each with its ini key or none."""
    parser, flags = options()
    page = PAGES["options.md"].read_text()
    assert re.findall(r"^\| `(--fp8-[a-z]+)\S*` \| (\S+) \|", page, re.M) == [
        (flag, f"`{key}`" if (key := flag.removeprefix("--").replace("-", "_")) in parser._inidict else "-")
        for flag in flags
    ]


def test_the_options_page_lists_every_argument_of_the_mark_with_its_default():
    fields = {field.name: field.default for field in dataclasses.fields(Case)}
    defaults = {"cases": None, "question": None, **fields, **LISTED, "options": {}}
    section = PAGES["options.md"].read_text().partition("## Arguments of the mark")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section, flags=re.MULTILINE)
    assert rows == [(name, repr(defaults[name])) for name in ARGUMENTS]


# -- examples and tables ------------------------------------------------------------------------------------------


@every_text
def test_every_python_example_can_be_read(name):
    for _, code in blocks(name, "python"):
        ast.parse(code)


def test_the_files_that_the_site_fills_in_exist():
    named = [path for name in PAGES for path in re.findall(r'^--8<-- "(.*)"$', PAGES[name].read_text(), re.M)]
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_results_page_is_of_the_stored_baselines():
    found = readable(read_folder(ROOT / "baselines"))
    lines = results.markdown([stored for _, stored in sorted(found.items())], Path("baselines"))
    assert "\n".join(lines) + "\n" == PAGES["results.md"].read_text()
