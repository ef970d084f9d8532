"""Whose processes are on the GPU: ours, what ours have started, and strangers."""

from pytest_fp8.gpu import strangers


def test_what_an_arm_has_started_is_no_stranger(monkeypatch):
    sessions = {100: 100, 101: 100, 102: 100, 900: 900}
    monkeypatch.setattr("os.getsid", lambda pid: sessions[pid])
    assert strangers([100, 101, 102], own={100}) == ()
    assert strangers([100, 101, 900], own={100}) == (900,)


def test_in_a_container_only_a_surplus_is_strange():
    assert strangers([70001, 70002], own={4, 5}) == ()
    assert strangers([70001, 70002, 70003], own={4, 5}) == (70003,)
