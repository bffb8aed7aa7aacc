"""Compress to bfloat16: half the bytes of float32, with its range and 8 bits of precision."""

import torch

from gpipe_hpc.comm.transport.wire import as_bytes


class BFloat16:
    """Numbers rounded to bfloat16."""

    def num_bytes(self, count: int) -> int:
        """Return two bytes a number."""
        return 2 * count

    def encode(self, numbers: torch.Tensor, key: int) -> torch.Tensor:
        """Return the numbers rounded to the nearest."""
        return as_bytes(numbers.to(torch.bfloat16))

    def decode(self, code: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rounded numbers."""
        return code.view(torch.bfloat16).to(dtype)
