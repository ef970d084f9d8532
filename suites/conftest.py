"""What several files of the suite ask: which precision Accelerate and the Trainer resolve to, by each road to them."""

from importlib.util import find_spec

import pytest

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: fp8
num_processes: 1
use_cpu: true
fp8_config:
  backend: AO
"""


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
