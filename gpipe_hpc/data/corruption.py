"""Policy for samples that cannot be decoded: stop, or skip and count them."""

import logging
from collections.abc import Iterable, Mapping

from gpipe_hpc.errors import DataError
from gpipe_hpc.settings import DataConfig

log = logging.getLogger("gpipe_hpc.train")


def tolerance(config: DataConfig) -> int:
    """Return the maximum number of corrupt samples; 0 if the first one stops the run."""
    if getattr(config, "corrupt", "stop") == "stop":
        return 0
    limit: int = vars(config)["max_corrupt"]
    return limit


class CorruptTally:
    """Counter of the distinct corrupt samples of a run, with the same count on every rank."""

    def __init__(self, limit: int, named: Iterable[str] = ()) -> None:
        self.limit = limit
        self._names = dict.fromkeys(named)

    @property
    def count(self) -> int:
        """Return the number of distinct corrupt samples."""
        return len(self._names)

    @property
    def names(self) -> list[str]:
        """Return the names of the corrupt samples, in the order in which they were found."""
        return list(self._names)

    def add(
        self, found: Mapping[str, str], *, says: bool, kind: type[DataError] = DataError
    ) -> None:
        """Count corrupt samples, given as error messages by sample name; log new ones if `says`.

        Raises an error of type `kind` with the newest message if the limit is exceeded.
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
    """Return the error message for the first corrupt sample beyond `limit`."""
    if not limit:
        return message
    return f"data: more corrupt samples than data.max_corrupt={limit} allows: {message}"
