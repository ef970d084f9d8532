"""Sound workloads of many kinds, which pytest-fp8 must leave alone: a user who is failed wrongly uninstalls it."""
