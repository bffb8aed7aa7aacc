"""Another service listens where the ranks are to meet."""

import socket
import threading
from contextlib import suppress

import pytest

from tests.support import patience


@pytest.fixture
def service():
    """Return the port of a service that says something of its own, and hangs up later."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                    timer = threading.Timer(2.5, connection.close)
                    timer.daemon = True
                    timer.start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_rank_that_finds_another_service_ends_with_its_message(start_ranks, tiny, service):
    """Python went down while a thread was in TCPStore: the process ended with SIGABRT."""
    ranks = start_ranks(
        2,
        *tiny,
        "comm.timeout_s=2",
        "comm.reach_s=2",
        ranks=[1],
        env={"MASTER_PORT": str(service)},
        is_whole=True,
    ).wait(60 * patience())
    assert ranks.codes == [1], ranks.outputs
    words = f"cannot use the store at 127.0.0.1:{service}"
    assert words in ranks.outputs[0] and "set MASTER_PORT to another" in ranks.outputs[0]
