"""The GPU: what it is, its state, which recipes it can run, and which models fit it."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fp8 import gpu as gpus
from pytest_fp8.arms.memory_plan import GIB, exceed_together, peak_bytes
from pytest_fp8.case import EMULATED_BACKENDS, Case
from pytest_fp8.codes import R
from pytest_fp8.doctor.line import NOTE, OK, Line, problem
from pytest_fp8.gpu import Gpu
from pytest_fp8.recipes import BACKENDS, RECIPES, recipe_facts, unmet_need
from pytest_fp8.zoo.shapes import SHAPES


def gpu_findings(gpu: Gpu | None, absent: str) -> Iterator[Line]:
    if gpu is None:
        yield Line(
            "GPU",
            NOTE,
            f"{absent}. Cases with emulated=True run on the CPU: layers, numerics, loss, checkpoints; never speed or "
            "memory",
        )
        return
    capability = ".".join(map(str, gpu.capability))
    text = f"{gpu.name}, driver {gpu.driver}, compute capability {capability}, {gpu.memory / GIB:.1f} GiB"
    power = f", power limit {gpu.power_limit:.0f} W" if gpu.power_limit else ""
    if gpu.chip:
        yield Line("GPU", OK, f"{text}{power}; {gpu.chip}: --fp8-gpu={gpu.key}")
    else:
        yield problem(
            R.NO_FP8_HARDWARE, "GPU", f"{text}{power}: no FP8 tensor cores", "an Ada, Hopper or Blackwell GPU"
        )


def condition_findings(gpu: Gpu) -> Iterator[Line]:
    """Clocks and neighbours, which decide what a timing is worth."""
    seen = gpus.conditions(gpu, set(), 0)
    if gpus.CLOCKS in seen.unknown:
        yield Line("clocks", NOTE, "the driver does not tell of them: speeds are judged without", "")
    elif seen.throttles:
        text = f"{seen.clock} MHz now, throttled: {', '.join(seen.throttles)}"
        yield problem(R.THROTTLED, "clocks", text, "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER: speeds are INVALID")
    else:
        yield Line("clocks", OK, f"{seen.clock} MHz now, not throttled")
    if gpus.NEIGHBOURS in seen.unknown:
        yield Line("neighbours", NOTE, "the driver does not tell of other processes: nobody else may use the GPU", "")
    elif seen.strangers:
        text = f"{len(seen.strangers)} other process(es) hold memory of this GPU"
        yield problem(R.NEIGHBOURS, "neighbours", text, "nvidia-smi shows them; speeds beside them are INVALID")
    else:
        yield Line("neighbours", OK, "no other process on this GPU")


def recipe_findings(gpu: Gpu | None) -> Iterator[Line]:
    """For each backend whose library is here: the recipes that run, and why others do not."""
    from pytest_fp8.backends import backend

    for name in (name for name in BACKENDS if any(recipe_facts(*key).roles for key in RECIPES if key[0] == name)):
        installed, reason = backend(name).available()
        recipes = [recipe for owner, recipe in RECIPES if owner == name]
        if not installed:
            # The text is folded at the end of a line, and what to do next is not.
            why, colon, package = reason.partition(": pip install ")
            yield Line("recipes", NOTE, f"{name}: {why}", f"pip install {package}" if colon else "")
        elif gpu is None or not gpu.chip:
            emulated = name in EMULATED_BACKENDS
            yield Line(
                "recipes",
                OK if emulated else NOTE,
                f"{name}: {', '.join(recipes)}, emulated on the CPU" if emulated else f"{name}: needs a GPU with FP8",
            )
        else:
            needs = {recipe: unmet_need(name, recipe, gpu.capability) for recipe in recipes}
            runs = ", ".join(recipe for recipe, need in needs.items() if not need) or "none"
            lacking = "".join(f"; {recipe} {need}" for recipe, need in needs.items() if need)
            yield Line("recipes", OK if runs != "none" else NOTE, f"{name}: {runs}{lacking}")


def memory_findings(gpu: Gpu) -> Iterator[Line]:
    """Which of the suite's models fit, with both arms side by side or one after the other. An estimate."""
    for backend, recipe in (("torchao", "tensorwise"), ("transformer_engine", "delayed")):
        words: dict[str, list[str]] = {"side by side": [], "by turns": [], "too large": []}
        for model in SHAPES:
            case = Case(model, backend, recipe)
            large, turns = peak_bytes(case) > gpu.memory, exceed_together(case, gpu)
            words["too large" if large else "by turns" if turns else "side by side"].append(model)
        listed = "; ".join(f"{word}: {', '.join(models)}" for word, models in words.items() if models)
        yield Line("memory", OK, f"both arms with {backend}, as estimated: {listed}")
