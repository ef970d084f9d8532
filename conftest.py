"""Makes the suite's case list importable from its test files, and has the controls run after all else."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "suites"))


def pytest_collection_modifyitems(items):
    """A broken arm takes the GPU from the healthy ones, which would have to be built again."""
    items.sort(key=lambda item: item.path.name == "test_controls.py")
