"""Sparse (wide) groups between ranks on threads, which record their connections."""

from gpipe_hpc.comm.collectives.sparse_group import SparseGroup
from gpipe_hpc.comm.watchdog.wait_listener import ignore_wait
from gpipe_hpc.comm.world.threads import ThreadWorld


class Heard:
    """A wide group over a thread group, and the positions of its connected peers."""

    def __init__(self, narrow):
        self.narrow, self.peers = narrow, set()
        self.wide = SparseGroup(
            self.narrow.ranks,
            self.narrow.position,
            self._start,
            self.peers.update,
            ignore_wait,
        )

    def _start(self, traffic, sends, receives, note):
        met = {self.narrow.ranks.index(piece.rank) for piece in (*sends, *receives)}
        assert met <= self.peers, f"{met - self.peers} were not connected"
        return self.narrow._start(traffic, sends, receives)


class WideWorld(ThreadWorld):
    """A thread world in which every group of more than two ranks is wide."""

    def __init__(self, world):
        self.heard = []
        super().__init__(world.hub, world.rank)

    def group(self, members):
        """Return the wide group that contains this rank, or a plain group of at most two ranks."""
        narrow = super().group(members)
        if narrow.size < 3:
            return narrow
        self.heard.append(Heard(narrow))
        return self.heard[-1].wide
