"""The suite's groups for ``-m``; and which precision Accelerate and the Trainer resolve to, which several files ask."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from matrix import GROUPS, group_of
from pytest_fp8.items import case_of

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: fp8
num_processes: 1
use_cpu: true
fp8_config:
  backend: AO
"""


def pytest_configure(config):
    for name, what in GROUPS.items():
        config.addinivalue_line("markers", f"{name}: {what}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before ``-m`` is applied."""
    for item in items:
        case = case_of(item) if item.path.parent == Path(__file__).parent else None
        group = group_of(case) if case is not None else ""
        if group:
            item.add_marker(group)


@pytest.fixture
def healthy_alone(request):
    """Skips in an update of baselines, to which a case that is known to fail has nothing to say."""
    from pytest_fp8.session import SESSION

    if request.config.stash[SESSION].settings.update:
        pytest.skip("an update of baselines measures healthy arms alone")


@pytest.fixture(scope="session")
def with_accelerate():
    """Skips where Accelerate or torchao is not installed, which are not imported here: that is the arms' business."""
    for package in ("torchao", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")


@pytest.fixture(scope="session")
def resolved(with_accelerate, tmp_path_factory):
    """``resolved(road, flag)``: what is trained in, with the Trainer's own flag (``bf16``) or none.

    Three roads, each a process, all asked at once: the environment alone, a config file through ``accelerate launch``,
    and ``accelerate launch`` without a file.
    """
    from concurrent.futures import ThreadPoolExecutor

    from pytest_fp8.resolve import resolve

    file = tmp_path_factory.mktemp("accelerate") / "fp8.yaml"
    file.write_text(CONFIG)
    with ThreadPoolExecutor() as pool:
        roads = {
            "environment": pool.submit(resolve, "fp8"),
            "file": pool.submit(resolve, "", file),
            "launch": pool.submit(resolve, "fp8", launch=True, asked=("",)),
        }

    def answer(road, flag):
        # What failed on one road is raised where that road is asked for.
        return next(switches for switches in roads[road].result() if switches.arguments == flag)

    return answer
