"""What the rank of LoRA adapters costs of FP8's speedup: fitted to stored baselines."""
