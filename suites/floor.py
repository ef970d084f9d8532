"""``assert_faster``: FP8 exceeds the case's floor. Where it is known not to, the test is expected to fail."""

import pytest

from pytest_fp8 import CheckFailed, Verdict
from pytest_fp8 import gpu as gpus

MEASURED_ON = "h200"
"""The GPU on which ``slower_because`` was measured. On another one FP8 may be faster, and the test may pass."""


class Slower(AssertionError):
    """FP8 is not faster than BF16. The only failure that is expected: an arm that died is another one."""


def assert_faster(request, fp8_pair):
    """Fail where FP8 does not exceed the case's floor; as expected, where the case has a ``slower_because``, or where
    the GPU waits for this machine's host and its work alone is faster: the suite tests libraries."""
    because = fp8_pair.case.slower_because
    # Strict: the test fails on the day FP8 becomes faster. A disturbed measurement is neither faster nor slower.
    gpu, _ = gpus.detect()
    strict = bool(because) and gpu is not None and gpu.key == MEASURED_ON
    try:
        decision = fp8_pair.assert_faster()
    except CheckFailed as failed:
        # Asked again, it is answered from the same blocks.
        numbers = fp8_pair.faster().numbers
        waits, account = numbers.get("waits_for_host"), numbers.get("account") or {}
        by_the_host = waits and account.get("busy_speedup", 0.0) > fp8_pair.case.floor
        if failed.verdict is not Verdict.FAIL or not (because or by_the_host):
            raise
        reason = because or f"this machine's host is too slow for it: {waits}"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=strict, raises=Slower))
        raise Slower(str(failed)) from None
    if because and decision.verdict in (Verdict.PASS, Verdict.IMPROVED):
        request.applymarker(pytest.mark.xfail(reason=because, strict=strict, raises=Slower))
