"""Can I switch back?"""

import pytest

import matrix

pytestmark = pytest.mark.fp8(cases=matrix.ALL, question="checkpoints")


def test_checkpoints(fp8_pair):
    fp8_pair.assert_checkpoints()
