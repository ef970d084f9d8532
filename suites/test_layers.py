"""Is FP8 really running?"""

import pytest

import matrix

pytestmark = pytest.mark.fp8(cases=matrix.ALL, question="layers")


def test_layers(fp8_pair):
    fp8_pair.assert_layers()
