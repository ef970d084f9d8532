"""``@pytest.mark.fp8_script(...)``: the commands of both arms, and the case that they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import R
from pytest_fp8.errors import refuse, refuse_unknown
from pytest_fp8.recipes import SCRIPT

if TYPE_CHECKING:
    import pytest

MARK = "fp8_script"
PLACE = "{}"
"""The word of a command in whose place each arm's own words come; without it they come at its end. In ``seed`` it
stands for the number."""
QUESTIONS = ("layers", "loss", "speedup", "memory")
"""What a script answers."""
LEAST_SEEDS = 4
"""Fewer say nothing of a loss gap."""
OF_THE_CASE = ("name", "emulated", "gpus", "steps", "seeds", "tolerance", "floor")
"""Arguments of the mark that are the case's, as in ``@pytest.mark.fp8``."""


@dataclass(frozen=True)
class Script:
    """A user's command, and what each arm has besides."""

    command: Sequence[str]
    """As it is typed in the folder that pytest is started in."""
    bf16: Sequence[str] = ()
    fp8: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables of both arms."""
    seed: Sequence[str] = ()
    """Words that set the seed, as ``["--seed", "{}"]``; empty where the loss gap is not asked."""
    share: float = 0.0
    """The least share of the FLOPs in FP8."""
    number: int | None = None
    """The seed of this run; ``None`` where the command's own counts."""

    def of(self, case: Case) -> list[str]:
        """The command of an arm."""
        own = list(self.fp8 if case.backend == SCRIPT else self.bf16)
        seed = [word.replace(PLACE, str(self.number)) for word in self.seed] if self.number is not None else []
        words = list(self.command)
        place = words.index(PLACE) if PLACE in words else len(words)
        return [*words[:place], *own, *words[place + 1 :], *seed]

    def seeded(self, number: int) -> Script:
        return replace(self, number=number)

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Script:
        return cls(**json.loads(text))

    @property
    def identity(self) -> str:
        """Arms and baselines are shared by scripts of one identity: the same commands, whatever the file holds."""
        return hashlib.sha256(replace(self, share=0.0).to_text().encode()).hexdigest()[:16]


def script_of(test: pytest.Item) -> Script | None:
    """The script that the nearest mark of a test names. Raises :class:`SettingsError`."""
    mark = test.get_closest_marker(MARK)
    return read(test.nodeid, mark)[0] if mark is not None else None


def case_of_mark(test: pytest.Item) -> list[Case]:
    """The case of that script; empty without a mark."""
    mark = test.get_closest_marker(MARK)
    return [read(test.nodeid, mark)[1]] if mark is not None else []


def read(test: str, mark: pytest.Mark) -> tuple[Script, Case]:
    """The script of a mark and its case. Raises :class:`SettingsError` naming the test."""
    where = f"@pytest.mark.{MARK} on {test}"
    words = ("bf16", "fp8", "seed")
    known = (*words, "env", "share", *OF_THE_CASE)
    for name in mark.kwargs:
        if name not in known:
            refuse_unknown(R.UNKNOWN_NAME, f"{where} has no argument {name!r}", name, known, "docs/watch.md")
    given = {"command": mark.args[0] if len(mark.args) == 1 else mark.args}
    given |= {name: mark.kwargs.get(name, ()) for name in words}
    wrong = [name for name, value in given.items() if not _are_words(value)]
    if wrong or not given["command"] or len(mark.args) != 1:
        name = (wrong or ["command"])[0]
        refuse(
            R.BAD_MARK,
            f"{where}: {name} is no list of words",
            expected="a command as a list, and a list of further words for each arm",
            seen=f"{given[name]!r:.200}",
            next_step="@pytest.mark.fp8_script([sys.executable, 'train.py', '--max_steps', '1000'], fp8=['--fp8'])",
        )
    env = {name: str(value) for name, value in dict(mark.kwargs.get("env", {})).items()}
    texts = {name: tuple(map(str, value)) for name, value in given.items()}
    share = mark.kwargs.get("share", 0.0)
    if not (isinstance(share, int | float) and 0 <= share <= 1):
        refuse(R.BAD_VALUE, f"{where}: share is a part of 1", seen=repr(share), next_step="share=0.7")
    script = Script(env=env, share=float(share), **texts)  # type: ignore[arg-type]
    return script, _case(script, {name: mark.kwargs[name] for name in OF_THE_CASE if name in mark.kwargs})


def _are_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str | Path) for word in value)


def _case(script: Script, given: dict[str, Any]) -> Case:
    name = next((Path(word).stem for word in script.command if word.endswith(".py")), Path(script.command[-1]).stem)
    parallel = "own" if given.get("gpus", 1) > 1 else ""
    return Case(OWN, SCRIPT, "none", questions=QUESTIONS, parallel=parallel, **{"name": name, **given})
