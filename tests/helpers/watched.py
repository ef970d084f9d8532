"""The small model as an arm in this process, and what it notes of its products and gradients."""

from helpers.arms import CASE, spec
from pytest_fp8.worker.server import ArmServer


def serve(case=CASE, **workload):
    return ArmServer(spec(case, **workload))


def products(server):
    return server.numerics(moved=False)["products"]


def gradients(server):
    return server.numerics(moved=False)["gradients"]
