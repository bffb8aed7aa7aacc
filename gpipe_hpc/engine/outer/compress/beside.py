"""Jobs that are carried out one after the other beside what a rank computes."""

from collections.abc import Callable, Sequence

from gpipe_hpc.comm.collectives.turns import Turn, Turns
from gpipe_hpc.comm.device import Device, Event
from gpipe_hpc.comm.group import Pending


class BesideOnThread:
    """Jobs of the host's memory, on a thread of their own."""

    def __init__(self, name: str) -> None:
        self._turns = Turns(name)

    def start(self, job: Callable[[], None]) -> Pending:
        """Start a job behind those before it."""
        return _OnThread(self._turns.start(lambda note: job()))


class _OnThread:
    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def when_done(self, call: Callable[[], None]) -> None:
        self._turn.calls.add(call)

    def wait(self) -> None:
        self._turn.wait(_unheard)


class BesideOnStream:
    """Jobs of an accelerator's memory, on a stream of their own. Not tried here on two GPUs."""

    def __init__(self, device: Device) -> None:
        self._stream, self._device = device.stream(), device

    def start(self, job: Callable[[], None]) -> Pending:
        """Put a job on the stream, behind what the current one has to do so far."""
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on(self._stream):
            job()
            return _OnStream(self._stream.record_event())


class _OnStream:
    def __init__(self, done: Event) -> None:
        self._done = done
        self._calls: list[Callable[[], None]] = []

    def when_done(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def wait(self) -> None:
        self._done.wait()
        while self._calls:
            self._calls.pop()()


def _unheard(ranks: Sequence[int] | None) -> None:
    """Tell nobody: the exchanges of the job say for whom they wait."""


Beside = BesideOnThread | BesideOnStream


def beside(name: str, device: Device) -> Beside:
    """Return what carries out jobs on a device."""
    return BesideOnStream(device) if device.is_accelerator else BesideOnThread(name)
