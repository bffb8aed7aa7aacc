"""What torch.distributed waits for: messages and collectives of ours in its own form."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.turns import Turn
from gpipe_hpc.comm.watchdog.noting import unheard
from gpipe_hpc.comm.world.mpi.progress import Message
from gpipe_hpc.comm.world.mpi.staging import Stage
from gpipe_hpc.device.device import Device


class MessageWork(dist.Work):
    """A send or a receive of host memory."""

    def __init__(self, message: Message, tensor: torch.Tensor, limit_s: float) -> None:
        super().__init__()
        self._message, self._tensor, self._limit_s = message, tensor, limit_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once it is done; RuntimeError if it failed or takes longer than the group's."""
        self._message.wait(_seconds(timeout, self._limit_s))
        return True

    def is_completed(self) -> bool:
        """Say whether it is done."""
        return self._message.test()

    def get_future(self) -> Any:
        """Return what tells C++ that it is done."""
        return _future(self._message.when_done, self.wait, [self._tensor])


class TurnWork(dist.Work):
    """A collective, or a message of a device's memory, that takes its turn on a thread.

    `stage`: what the device has to do until it is there; None where all is on the host.
    """

    def __init__(
        self,
        turn: Turn,
        tensors: Sequence[torch.Tensor],
        device: Device | None = None,
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        self._turn, self._tensors = turn, list(tensors)
        self._device, self._stage = device, stage

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once it is done on the host; the current stream then stands behind the rest."""
        if self._device is None or self._stage is None:
            self._turn.wait(unheard)
            return True
        self._turn.wait_for_thread()
        if self._stage.done is not None:
            self._device.current_stream().wait_event(self._stage.done)
        return True

    def is_completed(self) -> bool:
        """Say whether it is done."""
        if not self._turn.is_done:
            return False
        return self._stage is None or self._stage.done is None or self._stage.done.query()

    def get_future(self) -> Any:
        """Return what tells C++ that it is done, also on the device."""
        return _future(self._turn.calls.add, self._finish, self._tensors)

    def _finish(self) -> None:
        self._turn.wait(unheard)
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
    """Return how long to wait: torch gives nothing, or 0, for the group's own limit."""
    return timeout.total_seconds() if timeout else limit_s
