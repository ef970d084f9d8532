"""What the two arms do besides FP8: their ledgers, and the differences that FP8 does not explain."""
