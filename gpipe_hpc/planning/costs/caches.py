"""Between two timings of a layer something else is read, as other layers run in a pipeline."""

from typing import Final

import torch
from torch import Tensor

_BYTES: Final = 32_000_000  # more than the caches of a core have, and little beside a model


class Caches:
    """Fills a processor's caches with what no layer needs."""

    def __init__(self, is_host: bool) -> None:
        """Make what is read; nothing for an accelerator, whose layers are far larger."""
        self._read: Tensor | None = torch.ones(_BYTES // 4) if is_host else None

    def fill(self) -> None:
        """Read all of it."""
        if self._read is not None:
            self._read.sum()
