"""Does FP8 compute what it should, forward and backward?"""

import pytest

import matrix

pytestmark = pytest.mark.fp8(cases=matrix.ALL, question="numerics")


def test_numerics(fp8_pair):
    fp8_pair.assert_numerics()
