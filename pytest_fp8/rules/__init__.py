"""Decision rules: pure statistics, from numbers to a verdict."""
