"""Watchers believe nobody who does not know the job's secret."""

import contextlib
import json
import socket
import threading

from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.watchdog.json_connection import JsonConnection
from gpipe_hpc.comm.watchdog.watcher_connection import WatcherConnection

SECRET = Secret(b"k" * 32, "a test")


def pair(first, second, expected=1, rank=1):
    """Return the talks at both ends of a connection: rank 0 calls whom it takes for rank 1."""
    ends = socket.socketpair()
    caller = WatcherConnection(JsonConnection(ends[0]), 0, "a", first, expected, 0.0)
    called = WatcherConnection(JsonConnection(ends[1]), rank, "b", second, None, 0.0)
    for _ in range(3):
        for talk in (called, caller):
            assert talk.receive() == []
    return caller, called


def test_two_that_share_a_secret_learn_who_they_are():
    caller, called = pair(SECRET, SECRET)
    assert caller.is_proven and called.is_proven
    assert (caller.peer, called.peer) == (1, 0)
    assert (caller.host, called.host) == ("b", "a")
    caller.line.send({"kind": "beat"})
    assert called.receive() == [{"kind": "beat"}]


def test_who_has_another_secret_is_turned_away_at_both_ends():
    for caller, called in (
        pair(SECRET, Secret(b"x" * 32, "guessed")),
        pair(Secret(b"x" * 32, "guessed"), SECRET),
    ):
        assert not called.is_proven and not called.line.is_open
        assert not caller.is_proven and not caller.line.is_open


def test_a_watcher_of_another_rank_is_not_the_one_that_was_called():
    caller, called = pair(SECRET, SECRET, expected=2, rank=1)
    assert not caller.is_proven and not called.is_proven


def talk_with(*messages):
    """Return what a stranger who calls gets for its lines, and the talk at the called end."""
    own, theirs = socket.socketpair()
    called = WatcherConnection(JsonConnection(theirs), 1, "b", SECRET, None, 0.0)
    own.sendall(b"".join(messages))
    assert called.receive() == []
    own.settimeout(1.0)
    return own.recv(1 << 16), called


def test_a_stranger_who_calls_gets_no_proof_and_nothing_it_says_is_heard():
    hello = json.dumps({"kind": "hello", "rank": 0, "number": "1"}).encode() + b"\n"
    news = json.dumps({"kind": "failure", "report": "made up"}).encode() + b"\n"
    answer, called = talk_with(hello, news)
    assert b"proof" not in answer and not called.is_proven and not called.line.is_open
    for nonsense in (b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b"\xff\n", b"[" * 9000 + b"\n"):
        _, called = talk_with(nonsense)
        assert not called.line.is_open


def test_an_old_proof_is_worth_nothing():
    """Both ends of a former talk were read by a stranger, who plays the caller's back."""
    said = []
    ends = socket.socketpair()

    class Recorded(JsonConnection):
        def send(self, message):
            said.append(json.dumps(message).encode() + b"\n")
            super().send(message)

    caller = WatcherConnection(Recorded(ends[0]), 0, "a", SECRET, 1, 0.0)
    called = WatcherConnection(JsonConnection(ends[1]), 1, "b", SECRET, None, 0.0)
    for talk in (called, caller, called):
        talk.receive()
    assert called.is_proven and len(said) == 2
    _, called = talk_with(*said)
    assert not called.is_proven and not called.line.is_open


def test_a_line_without_end_is_cut_off():
    own, theirs = socket.socketpair()
    line = JsonConnection(theirs)
    own.setblocking(False)
    for _ in range(100):
        with contextlib.suppress(OSError):
            own.send(b"x" * 65536)
        line.receive()
        if not line.is_open:
            break
    assert not line.is_open, "it goes on listening"


def flood(connection, piece):
    """Send without pause until the other end hangs up."""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(piece)


def hear(talk):
    for _ in range(4096):
        talk.receive()


def test_who_sends_without_pause_is_cut_off_before_it_has_proved_itself():
    """Line ends without pause were read without end: the rank looked silent, and all ended."""
    hello = json.dumps({"kind": "hello", "rank": 0, "number": "1"}).encode()
    for piece in (b"\n" * 65536, b"x" * 65536, b" " * 65536, hello[:-1]):
        own, theirs = socket.socketpair()
        called = WatcherConnection(JsonConnection(theirs), 1, "b", SECRET, None, 0.0)
        threading.Thread(target=flood, args=(own, piece), daemon=True).start()
        heard = threading.Thread(target=hear, args=(called,), daemon=True)
        heard.start()
        heard.join(20.0)
        assert not heard.is_alive(), "it listens to nobody else"
        assert not called.line.is_open and called.line.num_read <= 4096


def test_a_neighbour_that_sends_without_pause_is_heard_piece_by_piece():
    caller, called = pair(SECRET, SECRET)
    message = json.dumps({"kind": "beat"}).encode() + b"\n"
    sender = threading.Thread(target=flood, args=(caller.line._connection, message * 100))
    caller.line._connection.setblocking(True)
    sender.start()
    try:
        for _ in range(3):
            messages = called.receive()
            assert len(messages) * len(message) <= (1 << 20) + len(message)
            assert all(each == {"kind": "beat"} for each in messages)
        assert called.line.is_open
    finally:
        called.line.close()
        sender.join(10.0)
