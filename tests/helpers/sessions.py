"""Sessions on a GPU that is not there: what is asked in them beside the fakes' suite, and their options."""

from __future__ import annotations

CHECKPOINTS = """
    @pytest.mark.fp8(cases=CASES, question="checkpoints")
    def test_checkpoints(fp8_pair):
        fp8_pair.assert_checkpoints()
"""
"""A further test for `helpers.fakes.SUITE`."""

UPDATE = ("--fp8-gpu=h200", "--fp8-update-baselines", "--fp8-reason=first")
