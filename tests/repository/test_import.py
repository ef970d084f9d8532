"""Having the plugin costs next to nothing: no torch, no numpy, a few milliseconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OWN = ("pytest_fp8.case", "pytest_fp8.codes", "pytest_fp8.session", "pytest_fp8.report")
HEAVY = (*OWN, "torch", "numpy", "transformers", "torchao", "rich", "cloudpickle", "pynvml", "yaml")
MARKED = """
import pytest
from pytest_fp8 import Case
@pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise", emulated=True)])
def test_a(fp8_pair): pass
"""
SUITES = Path(__file__).parents[2] / "suites"
COLLECT = (
    "import pytest; assert pytest.main(['--collect-only', '-p', 'no:cacheprovider', '-p', 'no:benchmark', {!r}]) == 0"
)


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (COLLECT.format("test_plain.py"), HEAVY),
        (COLLECT.format("test_marked.py"), ("torch", "numpy")),
        # Each name that their files import from the package comes without it, too.
        (COLLECT.format(str(SUITES)), ("torch",)),
        (f"sys.path[:0] = {[str(SUITES), str(SUITES.parent)]}; import controls.catalogue", ("torch",)),
        ("import pytest_fp8; [getattr(pytest_fp8, name) for name in pytest_fp8.__all__]", ("torch",)),
    ],
    ids=["a test", "a marked test", "the suites", "the controls", "every public name"],
)
def test_nothing_heavy_is_loaded(tmp_path, code, heavy):
    (tmp_path / "test_plain.py").write_text("def test_a(): pass")
    (tmp_path / "test_marked.py").write_text(MARKED)
    code = f"import sys\n{code}\nprint([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
