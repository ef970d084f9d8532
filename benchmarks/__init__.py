"""Benchmarks of pytest-fp8 itself: what it costs, and what its gate catches."""
