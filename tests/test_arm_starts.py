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
            "FP8-R08: the arm 'own-bf16-emulated on cpu' could not be started: No space left on device",
            "*expected:*folder below*",
            "*cause:*the temporary folder's disk is full*",
            "*next:*df -h*",
        ]
    )
    result.stdout.no_fnmatch_line("*Error:*mkdir*")


@pytest.mark.nightly
@pytest.mark.slow
def test_what_the_fork_server_could_not_import_is_told_and_not_what_came_of_it(pytester, monkeypatch):
    """The first import leaves half of a library behind; a second one would end in another error."""
    broken = pytester.mkpydir("transformers")
    (broken / "__init__.py").write_text(
        "import sys\n"
        "if hasattr(sys, 'imported_once'): raise RuntimeError('registered already')\n"
        "sys.imported_once = True\n"
        "raise ValueError('the folder of the cache cannot be written')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    pytester.makepyfile(WORKLOAD)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ValueError: the folder of the cache cannot be written"])
    result.stdout.no_fnmatch_line("*registered already*")
