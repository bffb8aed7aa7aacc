"""Background thread that enqueues collectives of thread ranks on device streams.

An exchange between threads blocks on the host until the other rank has arrived. A separate thread
therefore enqueues it, so that the calling thread continues.
"""

from collections.abc import Callable, Sequence

import torch

from gpipe_hpc.comm.collectives.collective_queue import CollectiveQueue, QueuedCollective
from gpipe_hpc.comm.collectives.group import CollectiveHandle, CompletionCallbacks
from gpipe_hpc.comm.collectives.on_stream import StreamPlanExecutor
from gpipe_hpc.comm.collectives.plan import Plan
from gpipe_hpc.comm.collectives.plan_executor import Exchange
from gpipe_hpc.comm.watchdog.wait_listener import ignore_wait
from gpipe_hpc.device.device import Device


class StreamEnqueuer:
    """A background thread that enqueues operations on device streams, one after the other."""

    def __init__(self, name: str, device: Device) -> None:
        self._turns, self._device = CollectiveQueue(name), device

    def start(self, begin: Callable[[], CollectiveHandle]) -> "EnqueueHandle":
        """Let the thread call `begin` with the caller's current stream as its current stream."""
        begun: list[CollectiveHandle] = []
        stream = self._device.current_stream()

        def put() -> None:
            self._device.use()
            with self._device.on(stream):
                begun.append(begin())

        return EnqueueHandle(self._turns.start(lambda note: put()), begun)


class EnqueueHandle:
    """Handle of an operation that the background thread enqueues."""

    def __init__(self, turn: QueuedCollective, begun: Sequence[CollectiveHandle]) -> None:
        self._turn, self._begun = turn, begun
        self._calls = CompletionCallbacks()

    def when_done(self, call: Callable[[], None]) -> None:
        """Run `call` once `wait` has completed."""
        self._calls.add(call)

    def wait(self) -> None:
        """Make the current stream wait for the operation; raise its exception, if any."""
        self._turn.wait(ignore_wait)  # each thread reports by itself the ranks that it waits for
        self._begun[0].wait()
        self._calls.make()


class ThreadPlanExecutor:
    """Executor of the plans of one group of thread ranks."""

    def __init__(
        self, ranks: Sequence[int], position: int, exchange: Exchange, device: Device
    ) -> None:
        self._carrier = StreamPlanExecutor(ranks, position, exchange, _nothing_to_build, device)
        self._put = StreamEnqueuer(f"collectives of {len(ranks)} ranks", device)

    def start(self, plan: Plan, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        """Start a plan after those started before; see `Group.start_plan`."""
        return self._put.start(lambda: self._carrier.start(plan, tensor, what))


def _nothing_to_build(tensor: torch.Tensor) -> None:
    """Do nothing: threads share memory and need no communicator."""
