"""Sends that have started and not left yet.

A send is a rendezvous: it ends when the receiver has taken it. Nobody may wait for that on the
computing thread, and the tensor must live until then, so a thread of its own sees it off.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gpipe_hpc.comm.transport.payload import Lane, Payload, Sendable

Part = tuple[Lane, torch.Tensor]


@dataclass
class _Line:
    """What the thread works on; not the outbox itself, which ends it by being dropped."""

    jobs: "queue.SimpleQueue[Callable[[], None] | None]" = field(default_factory=queue.SimpleQueue)
    changed: threading.Condition = field(default_factory=threading.Condition)
    num_pending: int = 0
    failure: RuntimeError | None = None


class Outbox:
    """Send messages in the order they were put, and drop their tensors once they are gone."""

    def __init__(self, start_on_thread: bool) -> None:
        """Create the outbox.

        `start_on_thread`: sends begin on the outbox's thread (staged copies must be awaited
        first); otherwise on the caller's, and the thread only waits for their end.
        """
        self._start_on_thread = start_on_thread
        self._line = _Line()
        self._on_stream: list[tuple[dist.Work, torch.Tensor]] = []
        self._thread: threading.Thread | None = None

    def put(self, peer: int, parts: Sequence[Part], payload: Payload) -> None:
        """Send the parts of one message to world rank `peer`.

        Raises RuntimeError if an earlier send has failed.
        """
        if self._line.failure is not None:
            raise self._line.failure
        ready = [(lane, payload.prepare(tensor)) for lane, tensor in parts]
        if payload.completes_on_stream:
            self._send_on_stream(peer, parts, ready)
        elif self._start_on_thread:
            self._enqueue(lambda: _wait_all(_start_all(peer, ready)))
        else:
            works = _start_all(peer, ready)
            # The closure keeps the tensors alive until the receiver has them.
            self._enqueue(lambda: _wait_all(works, ready))

    def drain(self) -> None:
        """Wait until everything put so far has left; raise what failed."""
        line = self._line
        with line.changed:
            line.changed.wait_for(lambda: line.num_pending == 0 or line.failure is not None)
        if line.failure is not None:
            raise line.failure
        for work, _ in self._on_stream:
            work.wait()  # orders the current stream behind the send; the host goes on
        self._on_stream.clear()

    def _send_on_stream(
        self, peer: int, parts: Sequence[Part], ready: Sequence[tuple[Lane, Sendable]]
    ) -> None:
        self._on_stream = [(w, t) for w, t in self._on_stream if not w.is_completed()]
        host: list[dist.Work] = []
        for (lane, tensor), (_, sendable) in zip(parts, ready, strict=True):
            work = sendable.start(lane, peer)
            assert work is not None, f"rank sends to itself: {peer}"
            if tensor.is_cuda:
                self._on_stream.append((work, tensor))
            else:
                host.append(work)
        self._enqueue(lambda: _wait_all(host, ready))

    def _enqueue(self, job: Callable[[], None]) -> None:
        line = self._line
        with line.changed:
            line.num_pending += 1
        line.jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_see_off, args=(line,), name="outbox", daemon=True
            )
            weakref.finalize(self, line.jobs.put, None).atexit = False
            self._thread.start()


def _see_off(line: _Line) -> None:
    while (job := line.jobs.get()) is not None:
        try:
            job()
        except RuntimeError as failure:
            line.failure = failure
        del job  # or the last message's tensors would live until the next one
        with line.changed:
            line.num_pending -= 1
            line.changed.notify_all()


def _start_all(peer: int, ready: Sequence[tuple[Lane, Sendable]]) -> list[dist.Work]:
    works = [sendable.start(lane, peer) for lane, sendable in ready]
    return [work for work in works if work is not None]


def _wait_all(works: Sequence[dist.Work], keep_alive: object = None) -> None:
    for work in works:
        work.wait()
