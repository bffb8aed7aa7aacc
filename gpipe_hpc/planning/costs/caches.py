"""Between two timings of a layer something else is read, as other layers run in a pipeline."""

from typing import Final

import torch
from torch import Tensor

_MOST_BYTES: Final = 32_000_000  # more than the caches of a core have, and little beside a model
_NUMBER_BYTES: Final = 4


class Caches:
    """Fills a processor's caches with what no layer needs."""

    def __init__(self, is_host: bool) -> None:
        """Make what is read; nothing for an accelerator, whose layers are far larger."""
        self._read: Tensor | None = None
        if is_host:
            self._read = torch.ones(_MOST_BYTES // _NUMBER_BYTES)

    def lessen(self, num_bytes: int) -> bool:
        """Read no more than so many bytes from now on; say whether that is less than before.

        A small model fits into the caches, and finds itself there again.
        """
        if self._read is None or num_bytes >= self._read.numel() * _NUMBER_BYTES:
            return False
        self._read = self._read[: num_bytes // _NUMBER_BYTES]
        return True

    def fill(self) -> None:
        """Read all of it."""
        if self._read is not None:
            self._read.sum()
