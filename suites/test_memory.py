"""What does it cost in memory?"""

import pytest

import matrix

pytestmark = pytest.mark.fp8(cases=matrix.ALL, question="memory")


def test_memory(fp8_pair):
    fp8_pair.assert_memory()
