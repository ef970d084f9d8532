"""The suite's groups for ``-m``, and the fixtures that several of its files use."""

from pathlib import Path

import pytest

from matrix import GROUPS, OWN_MODEL, group_of
from pytest_fp8.gpu import visible
from pytest_fp8.items import case_of, question_of

HERE = Path(__file__).parent
CORE, PUBLISHED = "core", "published"
MORE_THAN_80_GB = 90 * 2**30


def pytest_configure(config):
    for name, what in GROUPS.items():
        config.addinivalue_line("markers", f"{name}: {what}")
    config.addinivalue_line("markers", 'nightly: left out for each commit by `-m "not nightly"`; a release needs it')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Before ``-m`` is applied. Published cases are left out unless ``-m`` names them: they take long. Nightly tests of
    a group's cases are no part of it: where FP8 pays takes two minutes a case and judges nothing.

    The controls run last: the arm of a control takes the GPU's memory from healthy arms, which would have to be built
    again.
    """
    from pytest_fp8.options import SETTINGS

    without_plugin = SETTINGS not in config.stash
    items.sort(key=lambda item: item.path == HERE / "test_controls.py")
    left_out = []
    for item in items:
        if item.path.parent == HERE and without_plugin:
            item.add_marker(pytest.mark.skip(reason="the suites ask through pytest-fp8, which -p no:fp8 leaves out"))
        case = case_of(item) if item.path.parent == HERE else None
        if case is not None and not_each_commit(case, question_of(item)):
            item.add_marker("nightly")
        group = group_of(case) if case is not None else ""
        if group and not item.get_closest_marker("nightly"):
            item.add_marker(group)
        if group == PUBLISHED and PUBLISHED not in config.option.markexpr:
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


ASKED_THE_LOSS = (
    "micro-torchao-tensorwise-emulated",
    "micro-trainer.torchao-tensorwise-fp8_all_gather.False-emulated",
    "1b-torchao-tensorwise",
    "1b-te-delayed",
)
"""A step of the worker's own and a loop of a library's; of 1B one recipe of each library. Curves of other recipes say
nothing that their products, which numerics compares for each commit, do not."""


def not_each_commit(case, question):
    """Emulated curves take half of the suite's time, and so does tiny; those of 1B take a sixth of the core's, whose
    tiny is asked in every recipe. Of two processes Accelerate's shards train as the others do; a checkpoint holds the
    same weights whichever the recipe, and that of the mixture asks more than one of the vision transformer."""
    if question == "loss" and (case.emulated or (case.model == "1b" and group_of(case) == CORE)):
        return case.id not in ASKED_THE_LOSS
    if not case.emulated:
        return False
    if question == "checkpoints" and (case.recipe != "tensorwise" or case.name == "vit"):
        return True
    return case.model == "tiny" or (case.gpus > 1 and case.backend != "torchao")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """``-n 2`` without a GPU: a case's tests, and each control, go to one worker; so do the others, which share answers
    of Accelerate that take seconds."""
    from pytest_fp8.options import SETTINGS
    from pytest_fp8.xdist import by_case, case_of

    def together(nodeid):
        alone = "-emulated" in nodeid or "test_control[" in nodeid
        return case_of(nodeid) if alone else ""

    if SETTINGS not in config.stash or config.getoption("dist") != "load":
        return None
    if config.stash[SETTINGS].declared:
        return None
    return by_case(config, log, together)


def pytest_runtest_setup(item):
    """Skips cases that 80 GB do not hold, as measured on an H200: 8B with Transformer Engine or 8192 tokens. Of what
    is published, for one to eight GPUs, also what needs more of them than are here."""
    case = case_of(item)
    if case is None or not case.needs_gpu:
        return
    if group_of(case) == PUBLISHED and case.gpus > len(visible()):
        pytest.skip(f"{case.id} needs {case.gpus} GPUs, and {len(visible())} are here")
    from pytest_fp8.gpu import detect

    gpu = detect()[0]
    large = case.model == "8b" and case.gpus == 1 and (case.backend == "transformer_engine" or case.seq == 8192)
    if large and gpu is not None and gpu.memory < MORE_THAN_80_GB:
        pytest.skip(f"{case.id} takes 80 to 83 GiB at its peak, and this GPU has {gpu.memory / 2**30:.0f}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A control has no case of the session's, and counts among the tests that ran, or asked the GPU."""
    report = yield
    asks_gpu = getattr(item, "asks_gpu", None)
    if report.when == "call" and asks_gpu is not None:
        from pytest_fp8.report.record import Ended, plain_line

        why = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else ""
        ended = Ended(item.nodeid, "", report.outcome, why, not report.skipped, asks_gpu)
        report.fp8 = [plain_line(ended)]
    return report


@pytest.fixture
def fp8_workload(fp8_case):
    """The workload of a case whose model is a user's own."""
    if fp8_case.model != OWN_MODEL:
        return None
    from workloads import workload_of

    return workload_of(fp8_case)


@pytest.fixture
def healthy_alone(request):
    """Skips in an update of baselines: no baseline is stored of a case that is broken on purpose or known to fail."""
    from pytest_fp8.options import SETTINGS

    if request.config.stash[SETTINGS].update:
        pytest.skip("an update of baselines measures healthy arms alone")
