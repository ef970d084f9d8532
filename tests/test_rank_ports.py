"""The ports on which ranks of an arm meet: each arm has its own, and one in use is told."""

from __future__ import annotations

import socket

import pytest

from helpers.ranks import own
from pytest_fp8 import ArmError
from pytest_fp8.arms import ranks
from pytest_fp8.arms.ranks import RankedProcess

pytestmark = pytest.mark.slow


def test_a_port_in_use_is_one_clear_error(monkeypatch):
    with socket.socket() as taken:
        taken.bind((ranks.ADDRESS, 0))
        taken.listen()
        monkeypatch.setattr(ranks, "reserved_port", taken.dup)
        arm = RankedProcess(2, fork=True)
        monkeypatch.setattr(ranks, "GRACE_SECONDS", 1.0)
        try:
            with pytest.raises(ArmError, match=f"port {arm.port} is in use") as failure:
                arm.build(own())
            assert "free port" in failure.value.next_step
        finally:
            arm.close()


def test_each_arm_has_a_port_of_its_own():
    held = [ranks.reserved_port() for _ in range(8)]
    assert len({one.getsockname() for one in held}) == 8
    # Rank 0 can listen on it meanwhile, as torch's store does.
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(held[0].getsockname())
        store.listen()
    for one in held:
        one.close()


def test_what_listens_on_another_address_is_not_given_the_port_of_an_arm():
    held = [ranks.reserved_port() for _ in range(400)]
    ports = {one.getsockname()[1] for one in held}
    others = [socket.socket() for _ in range(100)]
    for other in others:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # As NCCL listens on the address of a network.
        other.bind(("127.0.0.2", 0))
        other.listen()
    assert ports.isdisjoint(other.getsockname()[1] for other in others)
    for one in (*held, *others):
        one.close()
