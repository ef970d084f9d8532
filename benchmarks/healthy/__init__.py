"""Sound workloads of many kinds, which pytest-fp8 must leave alone: a user who is failed wrongly uninstalls it.

python -m benchmarks.healthy [--recipe tensorwise] [--seeds 10] [--only lstm] [--json FILE]
"""
