"""How a tag of MPI says which group a message belongs to, and which of its queues.

All goes over one communicator. Its tags are cut in three: the group, from 1 up, the kind of
traffic, and the queue within it. So no group needs a communicator of its own: making one waits for
all its members in MPI, where nothing could end the wait, and an MPI library has some thousand at
most.
"""

from typing import Final

from gpipe_hpc.errors import LaunchError
from gpipe_hpc.setting_names import setting

_KIND_BITS: Final = 4
_MOST_QUEUE_BITS: Final = 10
# Callers cut their own tags of 31 bits so: the kind above, the queue below.
_KIND_SHIFT: Final = 27
OWN_KIND: Final = (1 << _KIND_BITS) - 1
"""The kind of the collectives of a group; those that callers name are below."""


class Tags:
    """The tags that an MPI library allows, up to `highest`; MPI promises 32767 at least."""

    def __init__(self, highest: int) -> None:
        bits = (highest + 1).bit_length() - 1
        self._queue_bits = min(_MOST_QUEUE_BITS, (bits - _KIND_BITS) // 2)
        self._num_groups = 1 << (bits - _KIND_BITS - self._queue_bits)

    def of(self, group: int, tag: int) -> int:
        """Return the tag of a group's number and a caller's tag; LaunchError if there is none."""
        return self._made(group, tag >> _KIND_SHIFT, tag & ((1 << _KIND_SHIFT) - 1))

    def own(self, group: int) -> int:
        """Return the tag of the group's collectives."""
        return self._made(group, OWN_KIND, 0)

    def _made(self, group: int, kind: int, queue: int) -> int:
        if queue >> self._queue_bits or not 0 <= kind <= OWN_KIND:
            raise LaunchError(
                f"MPI: expected tags below {1 << self._queue_bits}, as this library's bound on "
                f"tags leaves room for, got {queue}; use fewer stages for each rank, another MPI, "
                f"or {setting('comm.backend', 'gloo')}"
            )
        if group + 1 >= self._num_groups:
            raise LaunchError(
                f"MPI: expected {self._num_groups - 1} groups of ranks at most, as this library's "
                f"bound on tags leaves room for, got one more; use another MPI, or "
                f"{setting('comm.backend', 'gloo')}"
            )
        return ((group + 1 << _KIND_BITS | kind) << self._queue_bits) | queue
