"""Whether FP8 exceeds the case's floor, for the suite's files that ask it: expected to fail where that is known."""

import pytest


def assert_faster(request, fp8_pair):
    if fp8_pair.case.slower_because:
        # Strict: the day FP8 becomes faster here, this test says so.
        request.applymarker(pytest.mark.xfail(reason=fp8_pair.case.slower_because, strict=True))
    fp8_pair.assert_speedup(against_baseline=False)
