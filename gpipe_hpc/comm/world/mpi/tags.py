"""Encoding of group, kind of traffic and queue in an MPI tag.

All messages use one communicator. A tag consists of the number of the group, from 1 up, the kind of
traffic and the queue within it. So no group needs its own communicator: creating one blocks in MPI
until all members take part, where nothing could end the wait, and an MPI library supports only some
thousands.
"""

from typing import Final

from gpipe_hpc.errors import LaunchError
from gpipe_hpc.setting_names import setting

_KIND_BITS: Final = 4
_MOST_QUEUE_BITS: Final = 10
# Tags of callers have 31 bits: the kind in the upper bits, the queue in the lower.
_KIND_SHIFT: Final = 27
OWN_KIND: Final = (1 << _KIND_BITS) - 1
"""Kind of traffic of a group's collectives; kinds of callers are below."""


class Tags:
    """Encoder of group, kind and queue into MPI tags up to `highest`.

    `highest` is the library's limit, which MPI guarantees to be at least 32767.
    """

    def __init__(self, highest: int) -> None:
        bits = (highest + 1).bit_length() - 1
        self._queue_bits = min(_MOST_QUEUE_BITS, (bits - _KIND_BITS) // 2)
        self._num_groups = 1 << (bits - _KIND_BITS - self._queue_bits)

    def of(self, group: int, tag: int) -> int:
        """Return the MPI tag of a tag within a group; LaunchError if it is out of range."""
        return self._made(group, tag >> _KIND_SHIFT, tag & ((1 << _KIND_SHIFT) - 1))

    def own(self, group: int) -> int:
        """Return the MPI tag of the group's collectives."""
        return self._made(group, OWN_KIND, 0)

    def _made(self, group: int, kind: int, queue: int) -> int:
        if queue >> self._queue_bits or not 0 <= kind <= OWN_KIND:
            raise LaunchError(
                f"MPI: this library's limit on tags allows {1 << self._queue_bits} channels "
                f"between two ranks, got number {queue}; use fewer stages per rank, another MPI, "
                f"or {setting('comm.backend', 'gloo')}"
            )
        if group + 1 >= self._num_groups:
            raise LaunchError(
                f"MPI: this library's limit on tags allows {self._num_groups - 1} groups of ranks, "
                f"but one more is needed; use another MPI, or {setting('comm.backend', 'gloo')}"
            )
        return ((group + 1 << _KIND_BITS | kind) << self._queue_bits) | queue
