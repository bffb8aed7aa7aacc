"""What is done about samples that cannot be decoded: stop, or go on and keep count."""

import logging
from collections.abc import Iterable, Mapping

from gpipe_hpc.errors import DataError
from gpipe_hpc.settings import DataConfig

log = logging.getLogger("gpipe_hpc.train")


def tolerance(config: DataConfig) -> int:
    """Return how many corrupt samples a run bears: 0 where it stops at the first."""
    if getattr(config, "corrupt", "stop") == "stop":
        return 0
    limit: int = vars(config)["max_corrupt"]
    return limit


class CorruptTally:
    """The corrupt samples of a run, each counted once; the same on every rank."""

    def __init__(self, limit: int, named: Iterable[str] = ()) -> None:
        self.limit = limit
        self._names = dict.fromkeys(named)

    @property
    def count(self) -> int:
        """Return how many different samples were found corrupt."""
        return len(self._names)

    @property
    def names(self) -> list[str]:
        """Return their names, in the order in which they were found."""
        return list(self._names)

    def add(
        self, found: Mapping[str, str], *, says: bool, kind: type[DataError] = DataError
    ) -> None:
        """Count what was found: name -> what is wrong. `says`: log what is new.

        Raises an error of that kind, which gives the newest, where they become more than the limit.
        """
        for name, message in found.items():
            if name in self._names:
                continue
            self._names[name] = None
            if self.count > self.limit:
                raise kind(beyond(self.limit, message))
            if says:
                log.warning("corrupt sample %d of at most %d: %s", self.count, self.limit, message)


def beyond(limit: int, message: str) -> str:
    """Return the message for one corrupt sample more than the run bears."""
    if not limit:
        return message
    return (
        f"data: more corrupt samples than data.max_corrupt, expected at most {limit}, got one "
        f"more: {message}"
    )
