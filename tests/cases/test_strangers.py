"""Strangers who reach the sockets of a run do not end it."""

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.support import losses, patience


def watchers_ports(pids):
    """Return the ports on which the children of some processes listen."""
    ports = set()
    for pid in pids:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            inodes = set()
            for path in Path(f"/proc/{child}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
            for line in Path(f"/proc/{child}/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    ports.add(int(fields[1].partition(":")[2], 16))
    return ports


def flood(port, piece, is_over):
    """Send without pause; call again once the other end has hung up."""
    while not is_over.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as own:
            while not is_over.is_set():
                own.sendall(piece)


@pytest.mark.slow
def test_who_sends_line_ends_without_pause_ends_no_run(start_ranks, tiny, tmp_path, until):
    """The watcher read without end, its rank looked silent, and all ranks ended."""
    silence_s = 3 * patience()
    ranks = start_ranks(
        2,
        *tiny,
        *("train.steps=1000000", "pipeline.stages=2", f"comm.silence_s={silence_s}"),
        "run.dir=run",
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text(), 60, "it trains")
    ports = watchers_ports([command.pid for command in ranks.commands])
    assert len(ports) == 2
    is_over = threading.Event()
    floods = [
        threading.Thread(target=flood, args=(port, piece, is_over), daemon=True)
        for port in ports
        for piece in (b"\n" * 65536, b"x" * 65536)
    ]
    for each in floods:
        each.start()
    held = [socket.create_connection(("127.0.0.1", port)) for port in ports for _ in range(100)]
    time.sleep(2 * silence_s)
    done = len(losses(tmp_path / "run"))
    until(lambda: len(losses(tmp_path / "run")) > done + 3, 30, "it goes on")
    is_over.set()
    for each in (*held, *floods):
        each.close() if isinstance(each, socket.socket) else each.join(10)
    for command in ranks.commands:
        command.signal(signal.SIGTERM)
    assert ranks.wait(60 * patience()).codes == [75, 75], ranks.outputs
    assert not any("silent" in output for output in ranks.outputs), ranks.outputs
