"""What people say about FP8 training, as data, and what the stored baselines say about each claim."""
