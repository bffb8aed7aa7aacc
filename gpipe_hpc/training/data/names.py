"""Millions of names in little memory."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt


class Names:
    """Texts one after the other in one buffer.

    A list of as many objects takes several times the memory.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._text = b"".join(encoded)
        self._ends = np.fromiter(accumulate(map(len, encoded)), np.int64, len(encoded))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        start = int(self._ends[index - 1]) if index else 0
        return self._text[start : int(self._ends[index])].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def pick(self, kept: npt.NDArray[np.bool_]) -> "Names":
        """Return those that are marked."""
        return Names(self[int(index)] for index in np.flatnonzero(kept))

    def digest(self, numbers: npt.NDArray[Any]) -> str:
        """Return a short text of all names and of the numbers that go with them."""
        hashed = hashlib.sha256()
        for part in (self._text, self._ends.tobytes(), numbers.tobytes()):
            hashed.update(part)
        return hashed.hexdigest()[:16]
