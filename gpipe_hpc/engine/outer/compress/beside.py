"""Jobs that are carried out one after the other beside what a rank computes."""

from collections.abc import Callable, Sequence

from torch import Tensor

from gpipe_hpc.comm.collectives.on_stream import OnStream
from gpipe_hpc.comm.collectives.turns import Turn, Turns
from gpipe_hpc.comm.device import Device
from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.comm.noting import unheard
from gpipe_hpc.comm.thread_plans import PutByThread


class BesideOnThread:
    """Jobs of the host's memory, on a thread of their own."""

    def __init__(self, name: str) -> None:
        self._turns = Turns(name)

    def start(self, job: Callable[[], None], uses: Sequence[Tensor]) -> Pending:
        """Start a job behind those before it; `uses`: what it uses of the caller's."""
        return _OnThread(self._turns.start(lambda note: job()))


class _OnThread:
    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def when_done(self, call: Callable[[], None]) -> None:
        self._turn.calls.add(call)

    def wait(self) -> None:
        self._turn.wait(unheard)  # the exchanges of the job say for whom they wait


class BesideOnStream:
    """Jobs of an accelerator's memory, on a stream of their own. Not tried here on two GPUs."""

    def __init__(self, device: Device) -> None:
        self._stream, self._device = device.stream(), device

    def start(self, job: Callable[[], None], uses: Sequence[Tensor]) -> Pending:
        """Put a job on the stream, behind what the current one has to do so far."""
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on(self._stream):
            job()
            done = self._stream.record_event()
        for tensor in uses:
            self._device.lend(tensor, self._stream)
        return OnStream(done, self._device)


class BesideByThread:
    """As `BesideOnStream`, put there by a thread, as jobs wait for ranks that are threads too."""

    def __init__(self, name: str, device: Device) -> None:
        self._on_stream, self._put = BesideOnStream(device), PutByThread(name, device)

    def start(self, job: Callable[[], None], uses: Sequence[Tensor]) -> Pending:
        """Start a job behind those before it, and behind what the current stream has to do."""
        return self._put.start(lambda: self._on_stream.start(job, uses))


Beside = BesideOnThread | BesideOnStream | BesideByThread


def beside(name: str, device: Device, group: Group) -> Beside:
    """Return what carries out, on a device, jobs that send within a group."""
    if not device.is_accelerator:
        return BesideOnThread(name)
    is_of_threads = group.torch_group is None
    return BesideByThread(name, device) if is_of_threads else BesideOnStream(device)
