"""Samples of tensors: as many lines as are asked for, both ends among them, and views of values."""

from __future__ import annotations

import pytest
import torch

from pytest_fp8.worker.record.samples import Lines, values

pytestmark = pytest.mark.slow


def test_rows_and_columns_of_one_size_are_drawn_each_by_their_own_number():
    lines = Lines(torch.device("cpu"))
    assert lines(64, 64).tolist() == [*range(64)]
    few = lines(64, 16).tolist()
    assert {0, 63} < set(few)
    assert 12 < len(few) <= 18
    assert lines(64, 16, draw=1).tolist() != few
    assert lines(64, 16).tolist() == few


def test_values_are_a_view_from_all_over_the_tensor():
    whole = torch.zeros(512, 512)
    values(whole, 2**10).fill_(1)
    assert 2**9 < whole.count_nonzero() <= 2**11
    assert (whole.sum(0) > 0).all(), "every column of a width that is a power of two"
