"""Exchange of short texts between few ranks through the rendezvous store."""

import time
from collections.abc import Collection, Mapping
from typing import Final

from torch.distributed.distributed_c10d import Store

from gpipe_hpc.comm.collectives.group import rank_names
from gpipe_hpc.comm.watchdog.wait_listener import WaitListener, ignore_wait

_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.2


class StoreExchange:
    """Texts that ranks publish in the store under their own names.

    A rank writes one text and reads those of its peers, whatever the size of the world. It polls
    the store instead of blocking, so that a failure can end the wait. `note` is called with the
    ranks for which this rank waits.
    """

    def __init__(
        self, store: Store, rank: int, timeout_s: float, note: WaitListener = ignore_wait
    ) -> None:
        self._store, self._rank, self._timeout_s, self._note = store, rank, timeout_s, note
        self._is_closed = False

    def publish(self, what: str, text: str = "") -> None:
        """Publish this rank's text as `what`, a name not used before and equal on all ranks."""
        self._store.set(_key(what, self._rank), text)

    def collect(self, what: str, ranks: Collection[int]) -> Mapping[int, str]:
        """Return the texts of other ranks once all have published theirs.

        Raises TimeoutError, naming the missing ranks, and ConnectionError once a rank has failed.
        """
        keys = {rank: _key(what, rank) for rank in sorted(ranks)}
        self._await(what, keys)
        return {rank: self._store.get(key).decode() for rank, key in keys.items()}

    def absent(self, what: str, ranks: Collection[int]) -> list[int]:
        """Return the ranks that have not published a text yet; does not block."""
        return [rank for rank in sorted(ranks) if not self._store.check([_key(what, rank)])]

    def close(self) -> None:
        """Make waiting calls raise ConnectionError, because the run has failed."""
        self._is_closed = True

    def _await(self, what: str, keys: Mapping[int, str]) -> None:
        self._note(sorted(keys.keys() - {self._rank}) or None)
        deadline_s, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while keys and not self._store.check(list(keys.values())):
            if self._is_closed:
                raise ConnectionError(f"{what}: another rank has failed")
            if time.monotonic() > deadline_s:
                missing = rank_names(self.absent(what, keys))
                raise TimeoutError(f"{what}: timed out waiting for {missing}")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        self._note(None)


def _key(what: str, rank: int) -> str:
    return f"notice/{what}/{rank}"
