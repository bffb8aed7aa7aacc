"""What threads put on streams of accelerators where putting it there waits for other ranks.

An exchange among threads waits on the host until the other rank has come. So that nothing else has
to wait for that, a thread of its own puts it on its stream.
"""

from collections.abc import Callable, Sequence

import torch

from gpipe_hpc.comm.collectives.carrier import Exchange
from gpipe_hpc.comm.collectives.group import Calls, Pending
from gpipe_hpc.comm.collectives.on_stream import StreamCarrier
from gpipe_hpc.comm.collectives.plan import Plan
from gpipe_hpc.comm.collectives.turns import Turn, Turns
from gpipe_hpc.comm.watchdog.noting import unheard
from gpipe_hpc.device.device import Device


class PutByThread:
    """Lets a thread put one thing after the other on streams of a device."""

    def __init__(self, name: str, device: Device) -> None:
        self._turns, self._device = Turns(name), device

    def start(self, begin: Callable[[], Pending]) -> "Begun":
        """Let the thread call `begin`, behind what the calling thread's stream has to do."""
        begun: list[Pending] = []
        stream = self._device.current_stream()

        def put() -> None:
            self._device.use()
            with self._device.on(stream):
                begun.append(begin())

        return Begun(self._turns.start(lambda note: put()), begun)


class Begun:
    """What is being put on its stream, or has been."""

    def __init__(self, turn: Turn, begun: Sequence[Pending]) -> None:
        self._turn, self._begun = turn, begun
        self._calls = Calls()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this once it was waited for."""
        self._calls.add(call)

    def wait(self) -> None:
        """Put the current stream behind it; raise what ended it."""
        self._turn.wait(unheard)  # threads show themselves for whom they wait
        self._begun[0].wait()
        self._calls.make()


class ThreadPlans:
    """Carry out the plans of one group of threads."""

    def __init__(
        self, ranks: Sequence[int], position: int, exchange: Exchange, device: Device
    ) -> None:
        self._carrier = StreamCarrier(ranks, position, exchange, _nothing_to_build, device)
        self._put = PutByThread(f"collectives of {len(ranks)} ranks", device)

    def start(self, plan: Plan, tensor: torch.Tensor, what: str) -> Pending:
        """Start a plan behind those started before; see `Group.start_plan`."""
        return self._put.start(lambda: self._carrier.start(plan, tensor, what))


def _nothing_to_build(tensor: torch.Tensor) -> None:
    """Build no communicator: threads share memory."""
