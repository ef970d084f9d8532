"""A backend of another package: found through its entry point, in pytest's process and in arms."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NAMED = "[pytest_fp8.backends]\nmlp_alone = mlp_alone:MlpAlone\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The backend that docs/integrations.md shows, with its metadata in a folder on the path."""
    page = (ROOT / "docs/integrations.md").read_text().partition("## Write a backend")[2]
    code = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    metadata = tmp_path / "site/mlp_alone-1.0.dist-info"
    metadata.mkdir(parents=True)
    (tmp_path / "site/mlp_alone.py").write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mlp-alone\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(NAMED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)


@pytest.mark.usefixtures("installed")
def test_a_case_takes_it_and_no_torch_is_loaded():
    code = """
import sys
from pytest_fp8 import Case
case = Case("micro", "mlp_alone", "tensorwise", emulated=True)
print(case.id, case.reference().backend, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["micro-mlp_alone-tensorwise-emulated", "bf16", "False"], done.stderr


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_its_arms_are_judged_as_any_others(pytester):
    pytest.importorskip("torchao")
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[Case("micro", "mlp_alone", "tensorwise", emulated=True)])
        def test_mlps(fp8_pair):
            decision = fp8_pair.assert_layers()
            assert decision.numbers["roles"]["fprop"]["fp8"] == 6
            fp8_pair.assert_numerics()
        """
    )
    pytester.runpytest_subprocess("-p", "no:benchmark").assert_outcomes(passed=1)
