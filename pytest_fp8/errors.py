"""Every error that pytest-fp8 raises on purpose, and its four lines: expected, seen, cause, next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from pytest_fp8.codes import Code


class Fp8Error(Exception):
    """A problem that a person can act on: what was expected, what was seen, the likely cause, and what to type next.

    >>> from pytest_fp8.codes import R
    >>> print(Fp8Error(R.UNKNOWN_GPU, "unknown GPU", expected="h100 or h200", seen="'v100'", next_step="nvidia-smi -L"))
    FP8-R01: unknown GPU
      expected: h100 or h200
      seen:     'v100'
      next:     nvidia-smi -L
    """

    def __init__(
        self,
        code: Code,
        headline: str,
        *,
        expected: str = "",
        seen: str = "",
        cause: str = "",
        next_step: str = "",
    ) -> None:
        """``next_step``: by default what the code's page says to do."""
        self.code = code
        self.headline = headline
        self.expected = expected
        self.seen = seen
        self.cause = cause
        self.next_step = next_step or code.page.instead
        super().__init__(self.message)

    @property
    def first_line(self) -> str:
        """The code and the headline."""
        return f"{self.code}: {self.headline}"

    @property
    def message(self) -> str:
        return explain(self.first_line, self.expected, self.seen, self.cause, self.next_step)


class SettingsError(Fp8Error):
    """An option, marker argument or environment variable that is wrong."""


class ArmError(Fp8Error):
    """An arm's process raised, hung, ran out of memory or died: ``code`` says which."""


class BaselineError(Fp8Error):
    """A baseline file that is corrupt, belongs elsewhere, or cannot be written."""


class CheckFailed(AssertionError):
    """A check's ``verdict`` is FAIL (or, under ``--fp8-strict``, INCONCLUSIVE, INVALID or NOT_EXERCISED)."""

    def __init__(self, message: str, verdict: str) -> None:
        self.verdict = verdict
        super().__init__(message)


def explain(headline: str, expected: str, seen: str, cause: str, next_step: str) -> str:
    """The layout of every message: a headline, then those of the four lines that are not empty."""
    lines = [headline]
    for label, text in (("expected:", expected), ("seen:", seen), ("cause:", cause), ("next:", next_step)):
        if text:
            body = text.strip().replace("\n", "\n" + " " * 12)
            lines.append(f"  {label:<9} {body}")
    return "\n".join(lines)


def first_line(text: str, width: int = 140) -> str:
    """The first line of a message, cut between words: what a headline quotes.

    >>> first_line("KeyError: 'x'\\nand more")
    "KeyError: 'x'"
    """
    from textwrap import shorten

    return shorten(text.strip().partition("\n")[0], width, placeholder=" ...")


def refuse(code: Code, headline: str, **lines: str) -> NoReturn:
    """Raise a :class:`SettingsError`."""
    __tracebackhide__ = True
    raise SettingsError(code, headline, **lines)


def refuse_unknown(
    code: Code,
    headline: str,
    seen: object,
    known: Iterable[str],
    otherwise: str = "",
    cause: str = "",
) -> NoReturn:
    """Raise a :class:`SettingsError` for a name that is none of ``known``. The next step is the name that was probably
    meant, in any case of letters, or ``otherwise`` where none is near."""
    from difflib import get_close_matches

    names = list(known)
    lowered = {name.lower(): name for name in names}
    near = [lowered[name] for name in get_close_matches(str(seen).lower(), lowered, n=1)]
    refuse(
        code,
        headline,
        expected=", ".join(names) or "none",
        seen=repr(seen),
        cause=cause,
        next_step=f"did you mean {near[0]!r}?" if near else otherwise,
    )
