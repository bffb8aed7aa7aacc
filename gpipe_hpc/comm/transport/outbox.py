"""Threads that start and complete sends.

A send is a rendezvous: it completes when the receiver has received the tensor, which must stay
alive until then. The computing thread must not wait for that, so there is one thread per receiver.
These threads must not wait for each other either, because receivers may receive in another order.
Sends that must wait for a copy are started by a further thread, which waits only for copies.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

from gpipe_hpc.comm.transport.lanes import LaneWork
from gpipe_hpc.comm.transport.payload import OutgoingTensor, Payload
from gpipe_hpc.device.device import Device

Job = Callable[[], None]


class _SenderThread:
    """A thread that runs jobs in order until `close`."""

    def __init__(self, name: str, device: Device) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # The thread references only the jobs, not the object whose deletion ends the thread.
        thread = threading.Thread(
            target=_work_off, args=(self._jobs, device), name=name, daemon=True
        )
        thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)


def _work_off(jobs: "queue.SimpleQueue[Job | None]", device: Device) -> None:
    device.use()
    while (job := jobs.get()) is not None:
        job()
        del job  # otherwise the last message's tensors would live until the next one


class _SenderThreads:
    """The threads of an outbox.

    It does not reference the `Outbox`, whose garbage collection ends the threads.
    """

    def __init__(self, payload: Payload) -> None:
        self.changed = threading.Condition()
        self.num_pending = 0
        self.failure: Exception | None = None
        self._payload = payload
        self._num_unstarted = 0
        self._starts: _SenderThread | None = None
        self._peers: dict[int, _SenderThread] = {}

    def send(self, peer: int, parts: Sequence[OutgoingTensor]) -> None:
        """Start sending parts in call order, each once it is ready.

        The peer's thread waits until they are sent.
        """
        has_copies = any(part.ready is not None for part in parts)
        with self.changed:
            in_turn = has_copies or self._num_unstarted > 0
            self._num_unstarted += in_turn
            self.num_pending += 1
        if in_turn:
            if self._starts is None:
                self._starts = _SenderThread("outbox", self._payload.device)
            self._starts.put(lambda: self._start_in_turn(peer, parts))
            return
        try:
            self._see_off(peer, parts, _start(parts))
        except Exception as failure:
            self._done(failure)
            raise

    def close(self) -> None:
        """End all threads once their jobs are done."""
        for line in (self._starts, *self._peers.values()):
            if line is not None:
                line.close()

    def _start_in_turn(self, peer: int, parts: Sequence[OutgoingTensor]) -> None:
        try:
            for part in parts:
                if part.ready is not None:
                    part.ready.synchronize()
            self._see_off(peer, parts, _start(parts))
        except Exception as failure:
            self._done(failure)
        with self.changed:
            self._num_unstarted -= 1

    def _see_off(
        self, peer: int, parts: Sequence[OutgoingTensor], works: Sequence[LaneWork]
    ) -> None:
        """Let the peer's thread wait until all parts are sent; they stay alive until then."""
        line = self._peers.get(peer)
        if line is None:
            with self.changed:
                line = self._peers.get(peer)
                if line is None:
                    device = self._payload.device
                    line = self._peers[peer] = _SenderThread(f"outbox to {peer}", device)
        line.put(lambda: self._wait_for(parts, works))

    def _wait_for(self, parts: Sequence[OutgoingTensor], works: Sequence[LaneWork]) -> None:
        try:
            for work in works:
                work.wait()
        except Exception as failure:
            self._done(failure)
            return
        for part in parts:
            self._payload.gone(part)
        self._done()

    def _done(self, failure: Exception | None = None) -> None:
        with self.changed:
            self.num_pending -= 1
            self.failure = self.failure or failure
            self.changed.notify_all()


class Outbox:
    """Sends messages in order and releases their tensors once they are sent."""

    def __init__(self, payload: Payload) -> None:
        self._lines = _SenderThreads(payload)
        self._on_stream: list[tuple[LaneWork, OutgoingTensor]] = []
        weakref.finalize(self, self._lines.close).atexit = False

    def put(self, peer: int, parts: Sequence[OutgoingTensor]) -> None:
        """Send the parts of one message to world rank `peer`.

        Raises the error of an earlier send: RuntimeError if its receiver has ended.
        """
        if self._lines.failure is not None:
            raise self._lines.failure
        on_host = [part for part in parts if not part.on_stream]
        if len(on_host) < len(parts):
            self._on_stream = [(w, p) for w, p in self._on_stream if not w.is_completed()]
            self._on_stream += [(part.start(), part) for part in parts if part.on_stream]
        if on_host:
            self._lines.send(peer, on_host)

    def drain(self) -> None:
        """Block until all messages are sent; raise the error of a failed send."""
        lines = self._lines
        with lines.changed:
            lines.changed.wait_for(lambda: lines.num_pending == 0 or lines.failure is not None)
        if lines.failure is not None:
            raise lines.failure
        for work, _ in self._on_stream:
            work.wait()  # the current stream waits for the send; the host does not
        self._on_stream.clear()


def _start(parts: Sequence[OutgoingTensor]) -> list[LaneWork]:
    return [part.start() for part in parts]
