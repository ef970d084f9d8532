"""What arrives on an arm's socket: an answer to the last request, or one error that says what it was."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import tracemalloc
from multiprocessing.connection import Pipe

import pytest

from pytest_fp8.arms.channel import MOST_BYTES, Channel, Unreadable
from pytest_fp8.arms.output import LOG_LINES, end_of


@pytest.fixture
def ends():
    ours, theirs = Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def asked(ours, gone=lambda: False):
    channel = Channel(ours, gone)
    channel.ask("layers", {})
    return channel


def send(theirs, **answer):
    theirs.send_bytes(json.dumps(answer).encode())


def test_answers_as_json_and_as_bytes_come_back(ends):
    ours, theirs = ends
    channel = asked(ours)
    assert json.loads(theirs.recv_bytes()) == {"id": 1, "operation": "layers", "arguments": {}}
    send(theirs, id=1, result={"a": float("inf")})
    assert channel.answer(1)["result"] == {"a": float("inf")}
    channel.ask("logits", {})
    send(theirs, id=2, bytes=3)
    theirs.send_bytes(b"abc")
    assert channel.answer(1)["result"] == b"abc"


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        (b"hello from a print\n", "begins with b'hell'"),
        (struct.pack("!i", 12) + b"[1, 2, 3, 4]", "12 bytes that begins with b'[1, 2, '"),
        (struct.pack("!i", 3) + b"{}\n", "3 bytes that begins with"),
        (struct.pack("!i", 0), "0 bytes"),
        (struct.pack("!i", -7), "would have -7 bytes"),
        (struct.pack("!i", -1) + struct.pack("!Q", MOST_BYTES + 1), f"would have {MOST_BYTES + 1} bytes"),
        (struct.pack("!i", 10) + b'{"id": 1, ', "that is no JSON"),
        (struct.pack("!i", 9) + b'{"id": 1}', "without a result"),
        (struct.pack("!i", 22) + b'{"id": 7, "result": 1}', "an answer to request 7, where request 1 is the last"),
        (struct.pack("!i", 18) + b'{"id": 1, "bytes":', "no JSON"),
        (struct.pack("!i", 21) + b'{"id": 1, "bytes": 9}' + struct.pack("!i", 3) + b"abc", "3 bytes where 9"),
        (struct.pack("!i", 2**20) + b'{"id": ' + b"[" * (2**20 - 7), "that is no JSON"),
    ],
)
def test_what_is_no_answer_is_told(ends, written, seen):
    ours, theirs = ends
    channel = asked(ours)
    theirs.recv_bytes()
    writer = threading.Thread(
        target=lambda: [os.write(theirs.fileno(), written[i : i + 4096]) for i in range(0, len(written), 4096)]
    )
    writer.start()
    with pytest.raises(Unreadable) as error:
        channel.answer(5)
    writer.join()
    assert seen in str(error.value)


@pytest.mark.parametrize("written", [b"", b"\0", struct.pack("!i", 100) + b'{"id": 1, "result": [1, '])
def test_an_answer_that_is_cut_off_ends_with_the_time_limit_or_the_process(ends, written):
    ours, theirs = ends
    channel = asked(ours)
    if written:
        os.write(theirs.fileno(), written)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.answer(0.3)
    assert time.monotonic() - start < 3
    theirs.close()
    with pytest.raises(EOFError):
        channel.answer(5)


def test_death_is_seen_although_a_child_keeps_the_socket_open(ends):
    ours, theirs = ends
    ended = threading.Event()
    channel = asked(ours, ended.is_set)
    threading.Timer(0.1, ended.set).start()
    start = time.monotonic()
    with pytest.raises(EOFError):
        channel.answer(60)
    assert time.monotonic() - start < 5
    assert not theirs.closed


def test_what_a_process_said_before_it_died_is_read(ends):
    ours, theirs = ends
    channel = asked(ours, lambda: True)
    send(theirs, id=1, result="last words")
    assert channel.answer(5)["result"] == "last words"


def test_an_answer_of_forty_megabytes_takes_little_time_and_memory(ends):
    ours, theirs = ends
    channel = asked(ours)
    theirs.recv_bytes()
    text = "x" * 40_000_000
    writer = threading.Thread(target=lambda: send(theirs, id=1, result=text))
    writer.start()
    start = time.monotonic()
    answer = channel.answer(60)
    took = time.monotonic() - start
    writer.join()
    assert answer["result"] == text
    assert took < 10


def test_a_message_that_announces_much_and_brings_little_costs_no_memory(ends):
    ours, theirs = ends
    channel = asked(ours)
    os.write(theirs.fileno(), struct.pack("!i", MOST_BYTES) + b'{"id": ')
    tracemalloc.start()
    with pytest.raises(TimeoutError):
        channel.answer(0.2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


def test_the_end_of_an_output_is_its_last_lines_without_what_a_terminal_obeys():
    lines = end_of("\n".join(f"line {i}\x1b[31m\x07" for i in range(1000))).splitlines()
    assert len(lines) == LOG_LINES
    assert lines[-1] == "line 999[31m"


def test_a_deep_stack_is_shown_from_its_innermost_call():
    stack = ["Fatal Python error: Segmentation fault", "", "Current thread 0x00007f (most recent call first):"]
    stack += [f'  File "x.py", line {i} in f{i}' for i in range(100)]
    shown = end_of("\n".join(["before"] * 50 + stack)).splitlines()
    assert shown[0] == stack[0]
    assert shown[3].endswith("in f0")
    waiting = [
        "Thread 0x01 (most recent call first):",
        "  in idle",
        "",
        "Current thread 0x02 (most recent call first):",
    ]
    shown = end_of("\n".join(waiting + [f"  in g{i}" for i in range(100)])).splitlines()
    assert shown[:2] == [waiting[3], "  in g0"]
