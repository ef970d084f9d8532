"""Having the plugin costs next to nothing: no torch, no numpy, a few milliseconds."""

import subprocess
import sys

HEAVY = ("torch", "numpy", "transformers", "torchao", "rich", "cloudpickle", "pynvml")


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
        @pytest.mark.fp8(model="tiny", recipe="rowwise", emulated=True)
        def test_a(fp8_pair): pass
        """
    )
    pytester.makeconftest(
        "import sys\ndef pytest_unconfigure(config): print('TORCH', 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = pytester.runpytest_subprocess("--collect-only", "-p", "no:benchmark")
    result.stdout.fnmatch_lines(["TORCH False False"])


def test_the_package_gives_its_names_lazily():
    code = (
        "import sys, pytest_fp8; assert 'torch' not in sys.modules; pytest_fp8.Case; pytest_fp8.Workload; print('ok')"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "ok"
