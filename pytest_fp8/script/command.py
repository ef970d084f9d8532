"""``@pytest.mark.fp8_script(...)``: the commands of both arms, and the case that they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
"""Arguments of the mark that are the case's, as in ``@pytest.mark.fp8``. All others are fields of a :class:`Script`."""
KNOWN = ("bf16", "fp8", "env", "seed", "share", *OF_THE_CASE)


@dataclass(frozen=True)
class Script:
    """A user's command, and what each arm has besides. Raises ``TypeError`` for what are no lists of words."""

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

    def __post_init__(self) -> None:
        for name in ("command", "bf16", "fp8", "seed"):
            words = getattr(self, name)
            if not (isinstance(words, list | tuple) and all(isinstance(word, str | Path) for word in words)):
                raise TypeError(f"{name} is no list of words: {words!r:.200}")
            object.__setattr__(self, name, tuple(map(str, words)))
        if not self.command:
            raise TypeError("the command has no words")
        object.__setattr__(self, "env", {name: str(value) for name, value in dict(self.env).items()})
        if not (isinstance(self.share, int | float) and 0 <= self.share <= 1):
            raise TypeError(f"share is a part of 1, not {self.share}")

    def of(self, case: Case) -> list[str]:
        """The command of an arm."""
        own = list(self.fp8 if case.backend == SCRIPT else self.bf16)
        seed = [word.replace(PLACE, str(self.number)) for word in self.seed] if self.number is not None else []
        words = list(self.command)
        place = words.index(PLACE) if PLACE in words else len(words)
        return [*words[:place], *own, *words[place + 1 :], *seed]

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Script:
        return cls(**json.loads(text))

    @property
    def identity(self) -> str:
        """Arms and baselines are shared by scripts of one identity: the same commands, whatever the file holds."""
        return hashlib.sha256(replace(self, share=0.0).to_text().encode()).hexdigest()[:16]


def of_mark(test: pytest.Item) -> tuple[Script, Case] | None:
    """The script that the nearest mark of a test names, and its case; ``None`` without a mark. Raises
    :class:`SettingsError` naming the test."""
    mark = test.get_closest_marker(MARK)
    return read(test.nodeid, mark) if mark is not None else None


def read(test: str, mark: pytest.Mark) -> tuple[Script, Case]:
    given = {name: value for name, value in mark.kwargs.items() if name in OF_THE_CASE}
    for name in mark.kwargs:
        if name not in KNOWN:
            what = f"@pytest.mark.{MARK} on {test} has no argument {name!r}"
            refuse_unknown(R.UNKNOWN_NAME, what, name, KNOWN, "docs/watch.md")
    try:
        if len(mark.args) != 1:
            raise TypeError("the command is one list of words")
        script = Script(*mark.args, **{name: value for name, value in mark.kwargs.items() if name not in given})
    except (TypeError, ValueError) as error:
        refuse(
            R.BAD_MARK,
            f"@pytest.mark.{MARK} on {test}: {error}",
            expected="a command as a list of words, a list of further words for each arm, arguments of docs/watch.md",
            seen=f"{mark.args!r:.200} {mark.kwargs!r:.200}",
            next_step="@pytest.mark.fp8_script([sys.executable, 'train.py', '--max_steps', '1000'], fp8=['--fp8'])",
        )
    name = next((Path(word).stem for word in script.command if word.endswith(".py")), Path(script.command[-1]).stem)
    parallel = "own" if given.get("gpus", 1) != 1 else ""
    return script, Case(OWN, SCRIPT, "none", questions=QUESTIONS, parallel=parallel, **{"name": name, **given})
