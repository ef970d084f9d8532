"""What a test says where the process of an arm cannot be started, or cannot import what it needs."""

import pytest

WORKLOAD = """
    import pytest
    from torch import nn, randn
    from pytest_fp8 import Workload

    @pytest.fixture
    def fp8_workload():
        return Workload(lambda: nn.Linear(32, 32), batch=lambda step: randn(16, 32), loss=lambda m, x: m(x).sum())

    @pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True)
    def test_fp8(fp8_pair):
        fp8_pair.assert_layers()
"""


def test_a_full_temporary_folder_is_one_clear_error(pytester):
    pytester.makeconftest("""
        import errno, os, pytest, tempfile

        @pytest.fixture(autouse=True)
        def full(monkeypatch):
            def mkdir(*_, **__):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            monkeypatch.setattr(tempfile, "mkdtemp", mkdir)
    """)
    pytester.makepyfile(WORKLOAD)
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "the arm 'own-bf16-emulated on cpu' could not be started: No space left on device",
            "*expected:*folder below*",
            "*cause:*the temporary folder is full*",
            "*next:*df -h*",
        ]
    )
    result.stdout.no_fnmatch_line("*Error:*mkdir*")
