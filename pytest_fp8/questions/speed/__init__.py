"""Is it really faster? Timed blocks of both arms."""
