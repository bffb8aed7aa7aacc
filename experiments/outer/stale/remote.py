"""Serve a shard from its own process, over connections that carry no pickles."""

import json
import threading
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener
from typing import Final, Protocol

import torch
from torch import Tensor

from experiments.outer.stale.shard import ParameterShard, Values

ADDRESS: Final = "127.0.0.1"


class WatchedShard(ParameterShard, Protocol):
    """A shard that reports its parameters."""

    most_ahead: int

    def settled(self) -> tuple[int, Values]:
        """Return the number of finished iterations, and the parameters."""


def serve(shard: WatchedShard, listener: Listener, num_clients: int) -> None:
    """Serve `num_clients` clients, each on its own thread, until all have disconnected."""
    threads = []
    for _ in range(num_clients):
        threads.append(threading.Thread(target=_answer, args=(shard, listener.accept())))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _answer(shard: WatchedShard, connection: Connection) -> None:
    like = shard.settled()[1]
    try:
        while True:
            request = json.loads(connection.recv_bytes())
            match request["do"]:
                case "read":
                    found = shard.read(request["worker"], request["clock"])
                    connection.send_bytes(_packed(found))
                case "add":
                    update = _unpacked(connection.recv_bytes(), like)
                    shard.add(request["worker"], request["clock"], update)
                case "settled":
                    number, values = shard.settled()
                    facts = {"iterations": number, "most_ahead": shard.most_ahead}
                    connection.send_bytes(json.dumps(facts).encode())
                    connection.send_bytes(_packed(values))
    except (EOFError, ConnectionError):
        pass  # the client has disconnected
    finally:
        connection.close()


class RemoteShard:
    """A shard in another process; `like` has the names, shapes and dtypes of its parameters."""

    def __init__(self, port: int, key: bytes, like: Mapping[str, Tensor]) -> None:
        self._connection = Client((ADDRESS, port), authkey=key)
        self._like = dict(like)

    def read(self, worker: int, clock: int) -> Values:
        """Return the parameters for iteration `clock` of a worker, after the bound's wait."""
        self._ask(do="read", worker=worker, clock=clock)
        return _unpacked(self._connection.recv_bytes(), self._like)

    def add(self, worker: int, clock: int, update: Mapping[str, Tensor]) -> None:
        """Send the update of iteration `clock` of a worker."""
        self._ask(do="add", worker=worker, clock=clock)
        self._connection.send_bytes(_packed({name: update[name] for name in self._like}))

    def settled(self) -> tuple[dict[str, int], Values]:
        """Return the counters (finished iterations, most_ahead) and the parameters."""
        self._ask(do="settled")
        facts = json.loads(self._connection.recv_bytes())
        return facts, _unpacked(self._connection.recv_bytes(), self._like)

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()

    def _ask(self, **request: object) -> None:
        self._connection.send_bytes(json.dumps(request).encode())


def _packed(values: Mapping[str, Tensor]) -> bytes:
    return b"".join(value.contiguous().numpy().tobytes() for value in values.values())


def _unpacked(data: bytes, like: Mapping[str, Tensor]) -> Values:
    found, place = {}, 0
    buffer = bytearray(data)
    for name, value in like.items():
        flat = torch.frombuffer(buffer, dtype=value.dtype, count=value.numel(), offset=place)
        found[name] = flat.reshape(value.shape)
        place += value.numel() * value.element_size()
    assert place == len(data), f"shard: expected {place} bytes, got {len(data)}"
    return found
