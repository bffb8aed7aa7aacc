"""State shared by ranks that are threads of one process: queues, exchanges, first failure."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from gpipe_hpc.comm.collectives.group import rank_names
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.transport.base import Message, PlacedChannel
from gpipe_hpc.comm.transport.device_handoff import DeviceHandoff
from gpipe_hpc.comm.watchdog.report import FailureReport
from gpipe_hpc.comm.watchdog.timeouts import checked_timeout

T = TypeVar("T")
POLL_S = 0.05


ExchangeKey = tuple[tuple[int, ...], int]
"""The ranks of an exchange and its serial number."""


class MailKey(NamedTuple):
    """Key of a message between two ranks of a group."""

    group: ExchangeKey
    traffic: object
    source: int
    destination: int
    number: int  # counts the messages of this kind between the two ranks


@dataclass
class _Exchange:
    """Values contributed to an exchange by ranks, and the number of ranks that have read them."""

    parts: dict[int, Any] = field(default_factory=dict)
    num_taken: int = 0


class ThreadHub:
    """State shared by the threads of one world; every wait ends after `timeout_s` seconds."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self.timeout_s = checked_timeout(timeout_s, "timeout_s")
        self.changed = threading.Condition()
        self.report: FailureReport | None = None
        self.secret = Secret(secrets.token_bytes(32), "this process")
        self.queues: dict[PlacedChannel, deque[tuple[int, Message, DeviceHandoff]]] = {}
        self.mail: dict[MailKey, DeviceHandoff] = {}
        self._exchanges: dict[ExchangeKey, _Exchange] = {}

    def refuse_failed(self, what: str) -> None:
        """Raise ConnectionError, which mentions `what`, if any rank has failed."""
        if self.report is not None:
            raise ConnectionError(f"another rank has failed; not waiting for {what}")

    def wait_for(self, ready: Callable[[], T | None], what: str) -> T:
        """Block until `ready` returns a value other than None and return that value.

        The caller must hold the lock of `changed`. Raises ConnectionError if a rank fails
        meanwhile, TimeoutError after `timeout_s`.
        """
        deadline = time.monotonic() + self.timeout_s
        while (value := ready()) is None:
            if self.report is not None:
                raise ConnectionError(f"another rank failed while waiting for {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"received nothing from {what} within {self.timeout_s:g} s")
            self.changed.wait(POLL_S)
        return value

    def contribute(self, key: ExchangeKey, rank: int, value: Any) -> None:
        """Store this rank's contribution to the exchange `key`."""
        with self.changed:
            self._exchanges.setdefault(key, _Exchange()).parts[rank] = value
            self.changed.notify_all()

    def collect(self, key: ExchangeKey) -> list[Any]:
        """Block until all ranks have contributed; return the contributions in rank order."""
        ranks = key[0]
        with self.changed:
            exchange = self._exchanges[key]

            def complete() -> list[Any] | None:
                parts = exchange.parts
                return [parts[r] for r in ranks] if len(parts) == len(ranks) else None

            values = self.wait_for(complete, f"a collective of {rank_names(ranks)}")
            exchange.num_taken += 1
            if exchange.num_taken == len(ranks):
                del self._exchanges[key]
        return values

    def put_mail(self, key: MailKey, left: DeviceHandoff) -> None:
        """Store a message, whose tensors then belong to the receiver."""
        with self.changed:
            self.mail[key] = left
            self.changed.notify_all()

    def take_mail(self, key: MailKey) -> DeviceHandoff:
        """Block until a message is available; remove and return it."""
        with self.changed:
            self.wait_for(lambda: self.mail.get(key), f"rank {key.source}")
            return self.mail.pop(key)
