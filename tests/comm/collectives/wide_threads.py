"""Wide groups among threads, which know with whom they have connected."""

from gpipe_hpc.comm.collectives.sparse_group import SparseGroup
from gpipe_hpc.comm.watchdog.wait_listener import ignore_wait
from gpipe_hpc.comm.world.threads import ThreadWorld


class Heard:
    """A wide group over the mail of threads, and with whom it has connected."""

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
    """A thread's view of a hub in which every group of more than two is wide."""

    def __init__(self, world):
        self.heard = []
        super().__init__(world.hub, world.rank)

    def group(self, members):
        """Return the wide group of `members` that holds this rank."""
        narrow = super().group(members)
        if narrow.size < 3:
            return narrow
        self.heard.append(Heard(narrow))
        return self.heard[-1].wide
