"""Does the gate catch what it must? FP8 broken on purpose, one test per control. Healthy arms: test_questions.py.

The emulated ones run on any machine, the others on a GPU: ``pytest suites/test_controls.py --fp8-gpu=h200``.
"""

import importlib.util

import pytest

from controls.catalogue import CATALOGUE
from controls.control import GPU

CONTROLS = [
    pytest.param(control, id=control.id, marks=[pytest.mark.nightly] * control.nightly) for control in CATALOGUE
]


@pytest.fixture(scope="module")
def runner(request):
    from control_runner import ControlRunner
    from pytest_fp8.gpu import detect
    from pytest_fp8.plugin import session_of

    session = session_of(request.config)
    gpu = detect()[0]
    return ControlRunner(session.settings, session.pairs.pool, gpu.key if gpu is not None else "none")


def require(request, control):
    """Skip, or on a declared GPU fail, where this machine cannot run the control."""
    from pytest_fp8.gpu import visible
    from pytest_fp8.markers import why_not
    from pytest_fp8.options import SETTINGS

    for package in control.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    request.node.asks_gpu = control.runs() == GPU
    if control.runs() != GPU:
        return
    if control.case.gpus > 1 and control.case.gpus > len(visible()):
        pytest.skip(f"needs {control.case.gpus} GPUs")
    reason, failure = why_not(control.case, request.config.stash[SETTINGS])
    if failure:
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)


@pytest.mark.usefixtures("healthy_alone")
@pytest.mark.parametrize("control", CONTROLS)
def test_control(request, runner, control):
    require(request, control)
    outcome = runner.run(control)
    expected = f"{' or '.join(control.verdicts)}, {control.code}"
    assert outcome.caught, f"control {control.id} expects {expected}\n{outcome.message}"
