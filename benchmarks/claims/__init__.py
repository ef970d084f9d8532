"""What people say about FP8 training, as data, and what the stored baselines say about each claim. Loads no torch."""

from __future__ import annotations

from benchmarks.claims.claim import Claim, Near, Source
from benchmarks.claims.finetuning import FINETUNING
from benchmarks.claims.judgement import Finding, judge
from benchmarks.claims.pretraining import PRETRAINING
from benchmarks.claims.published import PUBLISHED

CLAIMS: tuple[Claim, ...] = (*PUBLISHED, *FINETUNING, *PRETRAINING)

__all__ = ["CLAIMS", "Claim", "Finding", "Near", "Source", "judge"]
