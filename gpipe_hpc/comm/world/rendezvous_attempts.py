"""Numbering of rendezvous attempts in a store that outlives them, such as that of torchrun's agent.

No number that torchrun provides identifies an attempt. Each agent counts its own restarts: an agent
that joined later counts fewer, and an agent that stops its workers because others have joined
counts none. So rank 0 opens an attempt by incrementing a counter, and the other ranks take the
newest attempt. Before any process of a new attempt starts, all processes of the previous one have
ended. Therefore an attempt is over if this rank has already entered it or if a newer one exists.
"""

import time
from collections.abc import Callable
from typing import Final

from gpipe_hpc.comm.world.membership import MembershipCheck
from gpipe_hpc.torch_compat import PrefixStore, Store

_COUNT: Final = "meetings"
_PAUSE_S: Final = 0.05


class RendezvousAttempts:
    """The rendezvous attempts in an agent's store, as seen by one rank.

    `call` returns the membership check for an attempt's store and number.
    """

    def __init__(self, store: Store, call: Callable[[Store, int], MembershipCheck]) -> None:
        self._store = store
        self._call = call

    def newest(self) -> int:
        """Return the number of the newest attempt; 0 if there is none."""
        return int(self._store.add(_COUNT, 0))

    def open(self) -> int:
        """Open an attempt as rank 0 and return its number.

        Raises LaunchError, on both processes, if another living process is rank 0, too.
        """
        newest = self.newest()
        if newest:
            self.roll_call(newest).refuse_living_double()
        return int(self._store.add(_COUNT, 1))

    def find(self, deadline: float) -> int | None:
        """Return the number of the attempt that rank 0 has opened; None if the deadline passes.

        After the deadline this may also be an attempt that has failed because this rank was
        missing. Raises LaunchError on both processes if another process has the same rank.
        """
        while True:
            newest = self.newest()
            call = self.roll_call(newest)
            if newest:
                call.refuse_living_double()
            is_open = newest > 0 and not call.has_entered
            if is_open and not call.has_verdict:
                return newest
            if time.monotonic() > deadline:
                return newest if is_open else None
            time.sleep(_PAUSE_S)

    def keys(self, number: int) -> Store:
        """Return the store of one attempt."""
        return PrefixStore(f"meeting{number}", self._store)

    def roll_call(self, number: int) -> MembershipCheck:
        """Return the membership check of an attempt; it ends when a newer attempt is open."""
        return self._call(self.keys(number), number)
