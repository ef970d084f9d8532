"""Makes suites/ importable, for its own test files, for tests/ and for the arms; runs the controls last."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "suites"))


def pytest_collection_modifyitems(items):
    """The arm of a control takes the GPU's memory from healthy arms, which would have to be built again."""
    items.sort(key=lambda item: item.path.name == "test_controls.py")
