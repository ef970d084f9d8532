"""Having the plugin costs next to nothing: no torch, no numpy, a few milliseconds."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = (
    "pytest_fp8.case",
    "pytest_fp8.codes",
    "pytest_fp8.session",
    "pytest_fp8.report",
    "torch",
    "numpy",
    "transformers",
    "torchao",
    "rich",
    "cloudpickle",
    "pynvml",
    "yaml",
)


def test_collecting_loads_nothing_heavy(pytester):
    pytester.makepyfile("def test_a(): pass")
    pytester.makeconftest(
        f"""
        import sys
        def pytest_unconfigure(config):
            print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
        """
    )
    result = pytester.runpytest_subprocess("--collect-only", "-p", "no:benchmark")
    result.stdout.fnmatch_lines(["LOADED []"])


def test_collecting_the_marked_tests_loads_no_torch(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case
        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise", emulated=True)])
        def test_a(fp8_pair): pass
        """
    )
    pytester.makeconftest(
        "import sys\ndef pytest_unconfigure(config): print('TORCH', 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = pytester.runpytest_subprocess("--collect-only", "-p", "no:benchmark")
    result.stdout.fnmatch_lines(["TORCH False False"])


def test_collecting_the_suites_loads_no_torch():
    """Each name that their files import from the package comes without it, too."""
    code = """
import sys, pytest
class Seen:
    def pytest_collection_finish(self, session):
        self.tests, self.torch = len(session.items), "torch" in sys.modules
seen = Seen()
code = pytest.main(["suites", "--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:benchmark"], plugins=[seen])
print(code.name, seen.tests > 400, seen.torch)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "OK True False", done.stdout


def test_no_public_name_loads_torch():
    code = "import sys, pytest_fp8; [getattr(pytest_fp8, n) for n in pytest_fp8.__all__]; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
