"""Code in an arm writes to the arm's socket, and prints."""

from __future__ import annotations

import os
import struct
import threading
import time

from benchmarks.faults.misbehaviours.entries import ANSWERS, DIES, GARBLES, entry, simply, sockets, to_sockets


def message(text: bytes) -> bytes:
    """As :meth:`multiprocessing.connection.Connection.send_bytes` writes it."""
    return struct.pack("!i", len(text)) + text


simply("text on its socket", GARBLES, "begins with b'what'", lambda: to_sockets(b"what is this\n"))
simply("an old answer", GARBLES, "request -1", lambda: to_sockets(message(b'{"id": -1, "result": 1}')))
simply("an answer that is no JSON", GARBLES, "no JSON", lambda: to_sockets(message(b'{"id": NaN, "result" 1}')))
simply("an answer of 2**40 bytes", GARBLES, "would have", lambda: to_sockets(struct.pack("!iQ", -1, 2**40)))
simply("a JSON of a million brackets", GARBLES, "no JSON", lambda: to_sockets(message(b'{"id": ' + b"[" * 10**6)))
simply("an answer without a result", GARBLES, "without a result", lambda: to_sockets(message(b'{"id": 2}')))


@entry("half an answer, then its death", DIES, "exited with 3")
def half_and_gone() -> None:
    to_sockets(struct.pack("!i", 99) + b'{"id": ')
    os._exit(3)


@entry("prints into its socket", GARBLES)
def print_to_socket() -> None:
    os.dup2(sockets()[0], 1)
    print("hello", flush=True)


@entry("prints 200 MB in lines, then dies", DIES, "exited with 1")
def many_lines() -> None:
    for _ in range(200):
        os.write(1, (b"x" * 99 + b"\n") * 10_000)
    os._exit(1)


@entry("prints 200 MB in one line", ANSWERS)
def one_line() -> None:
    for _ in range(200):
        os.write(1, b"x" * 10**6)


@entry("prints random bytes, then dies", DIES, "exited with 1")
def noise() -> None:
    os.write(2, os.urandom(10**6))
    os._exit(1)


@entry("prints escape sequences, then dies", DIES, "mine")
def colours() -> None:
    os.write(2, b"\x1b[2J\x1b]0;title\x07 mine\n")
    os._exit(1)


@entry("closes its standard output and error", ANSWERS)
def closed_output() -> None:
    os.close(1)
    os.close(2)


@entry("a thread that prints without end", ANSWERS)
def prints_on() -> None:
    def work() -> None:
        while True:
            os.write(1, b"x" * 999 + b"\n")
            time.sleep(0.001)

    threading.Thread(target=work, daemon=True).start()
