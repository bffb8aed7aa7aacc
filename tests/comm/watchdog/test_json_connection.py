"""What goes over a line comes whole, or shortened; a long text ends no connection."""

import socket

from gpipe_hpc.comm.watchdog.json_connection import MAX_TEXT, JsonConnection


def test_a_long_text_is_shortened_and_the_line_stays():
    """A report or a stack of more than 128 KiB ended the watcher: others took its rank for dead."""
    one, other = map(JsonConnection, socket.socketpair())
    arrived = []
    for text in ("\U0001f600" * 300_000, "x" * 300_000, "short"):
        one.send({"kind": "failure", "report": text})
        while one.has_unsent:
            one.flush()
            arrived += other.receive()
        arrived += other.receive()
    assert one.is_open and other.is_open
    first, second, third = (message["report"] for message in arrived)
    assert first == "\U0001f600" * MAX_TEXT + f" ... ({300_000 - MAX_TEXT} more characters)"
    assert second.startswith("x" * MAX_TEXT + " ... ")
    assert third == "short"
    one.close()
    other.close()
