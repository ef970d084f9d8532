"""``pytest-fp8 doctor``: what this machine can do for FP8 training, and what is in its way. No torch here."""
