"""Which meeting is this one? In a store that outlives attempts, as that of torchrun's agent does.

No number that torchrun gives tells it: agents count their restarts each for itself, one that has
come later counts fewer, and one whose workers are stopped because others have come counts none.
So rank 0 opens a meeting by counting on, and the others look for the newest. Before any process of
a new round starts, all of the one before have ended; so a meeting in which somebody was this rank
before is over, and one that is followed by another was left.
"""

import time
from collections.abc import Callable
from typing import Final

from gpipe_hpc.comm.world.roll_call import RollCall
from gpipe_hpc.torch_compat import PrefixStore, Store

_COUNT: Final = "meetings"
_PAUSE_S: Final = 0.05


class Meetings:
    """The meetings in an agent's store, as one rank sees them.

    `call`: the roll call of the meeting with such keys and number.
    """

    def __init__(self, store: Store, call: Callable[[Store, int], RollCall]) -> None:
        self._store = store
        self._call = call

    def newest(self) -> int:
        """Return the number of the newest one; 0 if there was none."""
        return int(self._store.add(_COUNT, 0))

    def open(self) -> int:
        """Open one, as rank 0; LaunchError, here and there, if another rank 0 is at it."""
        newest = self.newest()
        if newest:
            self.roll_call(newest).refuse_living_double()
        return int(self._store.add(_COUNT, 1))

    def find(self, deadline: float) -> int | None:
        """Return the one that rank 0 has opened for this rank too; None if none came in time.

        After the deadline also one in which others have found by then that this rank is missing.
        Raises LaunchError, here and there, if another process is this rank.
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
        """Return the store of one meeting."""
        return PrefixStore(f"meeting{number}", self._store)

    def roll_call(self, number: int) -> RollCall:
        """Return the roll call of a meeting; a rank that waits in it leaves when it is over."""
        return self._call(self.keys(number), number)
