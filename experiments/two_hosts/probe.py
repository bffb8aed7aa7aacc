"""One end of a measurement of the link.

    python probe.py serve PORT
    python probe.py trips ADDRESS PORT COUNT      round-trip times of one byte, JSON
    python probe.py stream ADDRESS PORT SECONDS   bits per second that arrive, JSON

Imports only the standard library, so that it can run on a host.
"""

import json
import socket
import sys
import threading
import time
from typing import Final

_BLOCK: Final = bytes(1 << 16)
_TRIPS, _STREAM = b"t", b"s"
_TRY_S: Final = 10.0


def serve(port: int) -> None:
    """Serve each connection: echo bytes, or count them."""
    listener = socket.create_server(("", port))
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,)).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        if connection.recv(1) == _TRIPS:
            while byte := connection.recv(1):
                connection.sendall(byte)
            return
        # The first second is not counted: the TCP window grows from zero.
        moments: list[tuple[float, int]] = []
        num_bytes = 0
        while received := connection.recv(1 << 20):
            num_bytes += len(received)
            moments.append((time.monotonic(), num_bytes))
        connection.sendall(json.dumps(rate_of(moments)).encode())


def rate_of(moments: list[tuple[float, int]]) -> float:
    """Return bits per second over the second half; moments are (seconds, bytes so far)."""
    middle_s = (moments[0][0] + moments[-1][0]) / 2
    (first_s, before), (last_s, after) = next(m for m in moments if m[0] >= middle_s), moments[-1]
    return 8 * (after - before) / (last_s - first_s) if last_s > first_s else 0.0


def _connect(address: str, port: int) -> socket.socket:
    """Connect as soon as the peer listens."""
    deadline_s = time.monotonic() + _TRY_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=_TRY_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def trips(address: str, port: int, count: int) -> list[float]:
    """Return the seconds of each round trip of one byte."""
    found = []
    with _connect(address, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_TRIPS)
        for _ in range(count):
            began_s = time.monotonic()
            connection.sendall(b".")
            connection.recv(1)
            found.append(time.monotonic() - began_s)
    return found


def stream(address: str, port: int, seconds: float) -> float:
    """Return the bits per second that arrive at full load."""
    with _connect(address, port) as connection:
        connection.sendall(_STREAM)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            connection.sendall(_BLOCK)
        connection.shutdown(socket.SHUT_WR)
        return float(json.loads(connection.recv(100)))


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "serve":
        serve(int(words[0]))
    elif what == "trips":
        print(json.dumps(trips(words[0], int(words[1]), int(float(words[2])))))
    else:
        print(json.dumps(stream(words[0], int(words[1]), float(words[2]))))
