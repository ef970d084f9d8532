"""Whether FP8 exceeds the case's floor, for the suite's files that ask it: expected to fail where that is known."""

import pytest

from pytest_fp8 import CheckFailed, Verdict
from pytest_fp8 import gpu as gpus

MEASURED_ON = "h200"
"""Where it is known. On another GPU products may weigh more or less: there it is no news that FP8 is faster."""


class Slower(AssertionError):
    """FP8 is not faster than BF16, and no other failure: an arm that died is none of the known ones."""


def assert_faster(request, fp8_pair):
    because = fp8_pair.case.slower_because
    if not because:
        fp8_pair.assert_faster()
        return
    # Strict: the day FP8 becomes faster here, this test says so. A disturbed measurement says neither.
    gpu, _ = gpus.detect()
    here = gpu is not None and gpu.key == MEASURED_ON
    known = pytest.mark.xfail(reason=because, strict=here, raises=Slower)
    try:
        decision = fp8_pair.assert_faster()
    except CheckFailed as failed:
        if failed.verdict is not Verdict.FAIL:
            raise
        request.applymarker(known)
        raise Slower(str(failed)) from None
    if decision.verdict in (Verdict.PASS, Verdict.IMPROVED):
        request.applymarker(known)
