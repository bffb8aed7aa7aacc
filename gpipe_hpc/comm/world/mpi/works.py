"""`dist.Work` handles for messages and collectives over MPI."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.collective_queue import QueuedCollective
from gpipe_hpc.comm.watchdog.wait_listener import ignore_wait
from gpipe_hpc.comm.world.mpi.progress import MpiMessage
from gpipe_hpc.comm.world.mpi.staging import StagingState
from gpipe_hpc.device.device import Device


class MessageWork(dist.Work):
    """Handle of a send or receive of host memory."""

    def __init__(self, message: MpiMessage, tensor: torch.Tensor, limit_s: float) -> None:
        super().__init__()
        self._message, self._tensor, self._limit_s = message, tensor, limit_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is complete; RuntimeError on failure or time-out."""
        self._message.wait(_seconds(timeout, self._limit_s))
        return True

    def is_completed(self) -> bool:
        """Return whether the message is complete."""
        return self._message.test()

    def get_future(self) -> Any:
        """Return a future that completes with the message."""
        return _future(self._message.when_done, self.wait, [self._tensor])


class QueuedWork(dist.Work):
    """Handle of a collective, or of a message of device memory, that runs on a background thread.

    `stage` is the state of the device's copies; None if all tensors are on the host.
    """

    def __init__(
        self,
        turn: QueuedCollective,
        tensors: Sequence[torch.Tensor],
        device: Device | None = None,
        stage: StagingState | None = None,
    ) -> None:
        super().__init__()
        self._turn, self._tensors = turn, list(tensors)
        self._device, self._stage = device, stage

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until complete on the host; the current stream waits for copies to the device."""
        if self._device is None or self._stage is None:
            self._turn.wait(ignore_wait)
            return True
        self._turn.wait_for_thread()
        if self._stage.done is not None:
            self._device.current_stream().wait_event(self._stage.done)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is complete, including copies to the device."""
        if not self._turn.is_done:
            return False
        return self._stage is None or self._stage.done is None or self._stage.done.query()

    def get_future(self) -> Any:
        """Return a future that completes after the operation and its copies to the device."""
        return _future(self._turn.calls.add, self._finish, self._tensors)

    def _finish(self) -> None:
        self._turn.wait(ignore_wait)
        if self._stage is not None and self._stage.done is not None:
            self._stage.done.synchronize()


def _future(
    when_done: Callable[[Callable[[], None]], None],
    finish: Callable[[], object],
    result: list[torch.Tensor],
) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()

    def tell() -> None:
        try:
            finish()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    when_done(tell)
    return future


def _seconds(timeout: timedelta | None, limit_s: float) -> float:
    """Return the time-out in seconds; torch passes None or 0 for the group's own."""
    return timeout.total_seconds() if timeout else limit_s
