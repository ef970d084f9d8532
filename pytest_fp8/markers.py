"""``@pytest.mark.fp8(...)``: its arguments, the cases it stands for, and why a test may not run here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from inspect import Parameter, Signature
from itertools import product
from typing import TYPE_CHECKING, Any

from pytest_fp8 import gpu as gpus
from pytest_fp8.backends import backend
from pytest_fp8.case import OWN, QUESTIONS, Case
from pytest_fp8.codes import R
from pytest_fp8.errors import SettingsError, refuse, refuse_unknown
from pytest_fp8.gpu import Gpu, is_kind
from pytest_fp8.libraries import installed
from pytest_fp8.options import Settings
from pytest_fp8.questions.findings import some
from pytest_fp8.recipes import DEFAULT_RECIPE, WAYS, backend_type, unmet_need

if TYPE_CHECKING:
    import pytest

LISTED = {"backend": "torchao", "recipe": DEFAULT_RECIPE}
"""Arguments that take a list as well, a case for each combination, and what a mark means without them."""
ARGUMENTS = (
    *("cases", "question", *LISTED, "options", "emulated", "compile", "autocast", "name"),
    *("gpus", "parallel", "steps", "seeds", "tolerance"),
)
"""Beside the first two, fields of a :class:`Case`; one with other fields goes into ``cases=``."""
PEFT = {"peft": "0.17"}
"""What adapters need."""
SIGNATURE = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in ARGUMENTS])


def cases_of(test: str, marks: Iterable[tuple[object, pytest.Mark]], settings: Settings) -> list[Case]:
    """The cases of a test from its marks, each with the function, class or module that has it; the nearest one wins.
    Raises :class:`SettingsError` naming the test."""
    where = f"@pytest.mark.fp8 on {test}"
    arguments = _arguments(where, marks)
    question, listed = arguments.pop("question", None), arguments.pop("cases", None)
    try:
        cases = _combined(arguments) if listed is None else list(listed)
    except SettingsError as error:
        given = {name: getattr(error, name) for name in ("expected", "seen", "cause", "next_step")}
        raise SettingsError(error.code, f"{where}: {error.headline}", **given) from None
    except TypeError:
        cases = [listed]
    if not all(isinstance(case, Case) for case in cases) or (listed is not None and arguments):
        refuse(
            R.BAD_MARK,
            f"{where}: cases=",
            expected="a list of pytest_fp8.Case, or the fields of one case; not both",
            seen=f"cases={listed!r:.200}" + "".join(f", {name}={value!r:.80}" for name, value in arguments.items()),
        )
    if question not in (None, *QUESTIONS):
        refuse_unknown(R.UNKNOWN_NAME, f"{where}: unknown question {question!r}", question, QUESTIONS)
    chosen = [case for case in cases if question is None or case.asks(question)]
    if not chosen:
        refuse(
            R.NO_CASE,
            f"{where} names no case" + (f" that answers {question!r}" if cases else ""),
            expected="one value at least in each list, and a case that answers the question",
            seen=some([case.id for case in cases]) or "an empty list",
        )
    return chosen


def _combined(arguments: dict[str, Any]) -> list[Case]:
    """One case for each combination of the fields that are lists. Raises :class:`SettingsError`."""
    full = {"model": OWN, **LISTED, **arguments}
    choices = [full[name] if isinstance(full[name], (list, tuple)) else [full[name]] for name in LISTED]
    made = [Case(**{**full, **dict(zip(LISTED, values, strict=True))}) for values in product(*choices)]
    return list(dict.fromkeys(made))


def _arguments(where: str, marks: Iterable[tuple[object, pytest.Mark]]) -> dict[str, Any]:
    """All arguments of a test's marks. Marks at one place may share the arguments among them, and not give one twice:
    ``parametrize`` refuses that as well."""
    arguments: dict[str, Any] = {}
    given_at: dict[str, object] = {}
    for place, mark in marks:
        try:
            SIGNATURE.bind_partial(*mark.args, **mark.kwargs)
        except TypeError as error:
            refuse(
                R.BAD_MARK,
                f"{where}: {error}",
                expected=f"some of these, by name: {', '.join(ARGUMENTS)}",
                seen=f"{mark.args!r:.80} {mark.kwargs!r:.200}",
            )
        for name, value in mark.kwargs.items():
            if given_at.setdefault(name, place) is not place:
                continue
            first = arguments.setdefault(name, value)
            if first is not value and first != value:
                refuse(
                    R.BAD_MARK,
                    f"two marks {where} give {name}=",
                    expected=f"{name}= in one of the marks that stand at one place",
                    seen=f"{name}={first!r:.80} and {name}={value!r:.80}",
                )
    return arguments


def why_not(case: Case, settings: Settings, beside: Iterable[Case] = ()) -> tuple[str, bool]:
    """Why a case does not run in this session, or an empty string; and whether its tests then fail instead of skip.
    ``beside``: the cases that the session's tests ask.

    They skip where the declared GPU is not this machine's: the session then fails at its end. They fail where the
    declared GPU is here and a library or recipe is missing. Under ``auto`` they skip whatever is missing. Emulated
    tests skip where a GPU was declared, and where others of the session ask the GPU itself.
    """
    gpu, absent = gpus.detect()
    in_use = gpu is not None and (is_kind(gpu, settings.gpu) if settings.declared else is_for(case, gpu))
    if case.emulated:
        if settings.declared:
            return f"emulated: --fp8-gpu={settings.gpu} was declared, and an emulated test asks nothing of it", False
        if gpu is not None and in_use and running(beside, settings):
            return f"emulated: other tests of this session ask the {gpu.name} itself", False
        return _library(case), False
    if settings.declared and not in_use:
        seen = f"this is {gpu.name}" if gpu is not None else absent
        return f"--fp8-gpu={settings.gpu} was declared; {seen}", False
    if gpu is None or not in_use:
        seen = f"; this is {gpu.name}" if gpu is not None else f": {absent}"
        emulates = case.model == OWN and backend_type(case.backend).emulates and case.gpus == 1
        here = "; emulated=True in its mark runs it on the CPU" if emulates else ""
        wanted = f"needs a {case.chip} GPU" if case.chip else "needs a GPU with FP8 tensor cores"
        return f"{wanted}{seen}{here}", False
    if not is_for(case, gpu):
        return f"case {case.id} is for {case.chip}; {gpu.name} is {gpu.chip}", False
    reason = _library(case) or _recipe(case, gpu) or _too_few(case)
    return reason, bool(reason) and settings.declared


def is_for(case: Case, gpu: Gpu | None) -> bool:
    """Whether a case is for this kind of GPU. Whether that can run its recipe is another matter."""
    return gpu is not None and bool(gpu.chip) and case.chip in ("", gpu.chip)


def one_of_each(cases: Iterable[Case]) -> list[Case]:
    """One case of each name, in their order, and one of those that are for another kind of GPU than this machine's. Of
    cases that are judged differently it has all their questions."""
    gpu = gpus.detect()[0]
    first: dict[tuple[str, bool], Case] = {}
    for case in cases:
        key = case.id, is_for(case, gpu)
        known = first.setdefault(key, case)
        if more := tuple(question for question in case.questions if question not in known.questions):
            first[key] = replace(known, questions=known.questions + more)
    return list(first.values())


def running(cases: Iterable[Case], settings: Settings) -> list[Case]:
    """Those of the GPU that run in this session."""
    return [case for case in cases if case.needs_gpu and not why_not(case, settings)[0]]


def _library(case: Case) -> str:
    """Why the case's libraries are not usable here, or an empty string."""
    more = {**WAYS[case.parallel].requires, **(PEFT if case.lora else {})}
    found = [backend(case.backend).available(), *(installed(*need) for need in more.items())]
    return next((reason for usable, reason in found if not usable), "")


def _too_few(case: Case) -> str:
    """Why there are not enough GPUs for the case's ranks, or an empty string."""
    have = len(gpus.visible())
    if case.gpus == 1 or have >= case.gpus:
        return ""
    cure = f"-k 'not {case.parallel}.{case.gpus}' leaves such cases out; each xdist worker has a share of them"
    return f"case {case.id} needs {case.gpus} GPUs, and CUDA programs see {have}; {cure}"


def _recipe(case: Case, gpu: Gpu) -> str:
    """Why this GPU cannot run the case's recipe, or an empty string."""
    needs = unmet_need(case.backend, case.recipe, gpu.capability)
    have = f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    return f"recipe {case.recipe!r} of {case.backend} {needs}; {have}" if needs else ""
