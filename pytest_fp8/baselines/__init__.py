"""Stored baselines: read, reviewed, updated."""
