"""A writer that is killed, or finds no room, at any step: the old baseline or the new one is there, whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
RENAMED = ("after replace",)


@pytest.fixture(scope="module")
def attempts():
    # Not pytest's own folder: the read-only attempt gives up root's rights, and must still be able to get there.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-m", "helpers.crash_writer", folder],
            cwd=TESTS,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["attempt"]: row for row in rows}


def of(attempts, prefix):
    chosen = [row for name, row in attempts.items() if name.startswith(prefix)]
    assert chosen, f"no attempt called {prefix}..."
    return chosen


@pytest.mark.nightly
def test_a_reader_always_finds_a_whole_file(attempts):
    assert [row for row in attempts.values() if not row["whole"]] == []


def test_every_step_and_every_byte_was_a_place_to_die(attempts):
    at_bytes = of(attempts, "kill at byte")
    at_steps = [row for row in of(attempts, "kill ") if row not in at_bytes]
    assert [row for row in at_steps if row["killed"] != signal.SIGKILL] == []
    assert len(at_steps) == 16
    assert [row for row in at_bytes if row["killed"] != signal.SIGXFSZ] == []
    assert len(at_bytes) > 250
    # The kernel stopped each at its own byte.
    assert [row["bytes left"] for row in at_bytes] == list(range(len(at_bytes)))


def test_before_the_rename_it_is_the_old_file_and_from_then_on_the_new_one(attempts):
    for row in of(attempts, "kill "):
        expected = "new" if row["attempt"].removeprefix("kill ") in RENAMED else "old"
        assert row["content"] == expected, row


def test_what_a_killed_writer_leaves_is_hidden_and_the_next_update_removes_it(attempts):
    left = [row for row in attempts.values() if row["hidden"]]
    assert len(left) > 250, "most kills leave the half-written file"
    for row in attempts.values():
        assert all(name.startswith(".tiny-case.json.") and name.endswith(".tmp") for name in row["hidden"])
        assert row["after the next update"] == ["tiny-case.json"]


@pytest.mark.parametrize("how", ["full at ", "really full at byte", "read-only"])
def test_without_room_or_permission_the_old_file_stays_and_the_error_says_so(attempts, how):
    rows = of(attempts, how)
    for row in rows:
        assert row["killed"] == 0
        assert row["content"] == "old", row
        assert "could not write" in row["said"]
        assert "the earlier file is whole" in row["said"]
        assert row["hidden"] == [], "nothing half-written stays"


def test_the_real_limits_were_those_of_the_system(attempts):
    assert "File too large" in of(attempts, "really full at byte 37")[0]["said"]
    assert "Permission denied" in attempts["read-only"]["said"]
