"""Controls: FP8 broken on purpose, each in a way that has happened to somebody, to show what the checks catch."""
