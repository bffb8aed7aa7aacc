"""Top-k: the numbers of a bucket that are largest in size, and where they stand.

Aji and Heafield, Sparse communication for distributed gradient descent, 2017; Lin et al., Deep
gradient compression, 2018 (without its correction of the momentum, its masks and its warm-up).
"""

import math
from typing import Final

import torch

from gpipe_hpc.comm.transport.wire import as_bytes
from gpipe_hpc.engine.outer.compress.compressor import Stateless, Task
from gpipe_hpc.errors import ConfigError

_MOST: Final = 0.5  # an index takes as many bytes as a number


class TopK(Stateless):
    """Send a fraction of a bucket's numbers, those of the largest size; all copies add up all.

    A number takes 4 bytes (8 in float64) and its index 4. Each copy gets those of every other one.
    """

    def __init__(self, fraction: float) -> None:
        if not 0 < fraction <= _MOST:
            raise ConfigError(
                f"outer.topk_fraction: expected above 0 and at most {_MOST}, as an index takes as "
                f"many bytes as a number, got {fraction}; 0.01 is usual"
            )
        self._fraction = fraction

    def num_kept(self, count: int) -> int:
        """Return how many of a bucket's numbers are sent."""
        return min(count, math.ceil(self._fraction * count))

    def sum(self, own: torch.Tensor, task: Task) -> torch.Tensor:
        """Return the sum of what was chosen, in the order of ranks; see `Compressor`."""
        count = own.numel()
        assert count < 2**31, f"a bucket of {count} numbers needs longer indices"
        kept = self.num_kept(count)
        chosen = own.abs().topk(kept, sorted=False).indices.sort().values
        message = torch.cat([as_bytes(chosen.to(torch.int32)), as_bytes(own[chosen])])
        total = torch.zeros_like(own)
        sizes = [message.numel()] * task.group.size
        gathered = message.repeat(task.group.size)
        task.group.all_gather(gathered, sizes)
        for each in torch.split(gathered, sizes):
            places, values = each[: 4 * kept].clone().view(torch.int32), each[4 * kept :]
            # A copy names each place once, so nothing depends on the order within.
            total.index_add_(0, places, values.clone().view(own.dtype))
        own[chosen] = 0
        return total
