"""Is the loss still right?"""

import pytest

import matrix

pytestmark = pytest.mark.fp8(cases=matrix.ALL, question="loss")


def test_loss(fp8_pair):
    fp8_pair.assert_loss()


@pytest.mark.nightly
@pytest.mark.fp8(cases=matrix.LONG, question="loss")
def test_what_begins_later(fp8_pair):
    fp8_pair.assert_loss(steps=300)
