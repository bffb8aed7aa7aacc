"""A compact sequence of strings, for millions of sample names."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from gpipe_hpc.data.paths import refuse_shrunk


class Names:
    """Immutable sequence of strings in one buffer, much smaller than a list of str objects."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self.text: npt.NDArray[np.uint8] = np.frombuffer(b"".join(encoded), np.uint8)
        self.ends: npt.NDArray[np.int64] = np.fromiter(
            accumulate(map(len, encoded)), np.int64, len(encoded)
        )

    @classmethod
    def of(cls, text: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> "Names":
        """Create the sequence from concatenated UTF-8 `text` and the end of each string."""
        names = cls(())
        names.text, names.ends = text, ends
        return names

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        refuse_shrunk(self.text)
        start = int(self.ends[index - 1]) if index else 0
        return self.text[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def pick(self, kept: npt.NDArray[np.bool_]) -> "Names":
        """Return the names selected by a boolean mask."""
        lengths = np.diff(self.ends, prepend=0)
        return Names.of(self.text[np.repeat(kept, lengths)], np.cumsum(lengths[kept]))

    def digest(self, numbers: npt.NDArray[Any]) -> str:
        """Return a digest of all names and of an array with numbers for each name."""
        hashed = hashlib.sha256()
        for part in (self.text, self.ends, numbers):
            hashed.update(np.ascontiguousarray(part).tobytes())
        return hashed.hexdigest()[:16]
