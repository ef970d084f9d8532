"""What people say about FP8 training, as data, and what the stored baselines say to each claim. Loads no torch."""

from __future__ import annotations

from pytest_fp8.claims.claim import Claim, Near, Source
from pytest_fp8.claims.finetuning import FINETUNING
from pytest_fp8.claims.judgement import Finding, judge
from pytest_fp8.claims.pretraining import PRETRAINING
from pytest_fp8.claims.published import PUBLISHED

CLAIMS: tuple[Claim, ...] = (*PUBLISHED, *FINETUNING, *PRETRAINING)

__all__ = ["CLAIMS", "Claim", "Finding", "Near", "Source", "judge"]
