"""Sums over a group by the accelerator's own backend, where it has them; else by way of the host.

NCCL and XCCL sum float64; backends out of torch's tree need not (HCCL's of some devices know 16 and
32 bits alone), and no backend has a sum for every dtype. What one lacks it says when it is called,
with an error of its own. So the first sum of a dtype is tried on one element, ahead of the first
step for all that steps use, and the ranks agree on whether it goes. What does not go is summed by
Gloo, with the same bits on all ranks; the host waits for it then.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_hpc.comm.collectives.group import rank_names
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.setting_names import setting

log = logging.getLogger("gpipe_hpc.comm")


class OwnSums:
    """Knows which dtypes the backend of one group sums; the same calls on each of its ranks.

    `agree` sums a tensor of the host over the ranks, in place.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        device: Device,
        agree: Callable[[Tensor], object],
    ) -> None:
        self._group, self._ranks, self._device, self._agree = group, ranks, device, agree
        self._goes: dict[torch.dtype, bool] = {}

    def goes(self, dtype: torch.dtype) -> bool:
        """Say whether the backend sums a dtype; the first call for each asks all ranks.

        Raises ConfigError where it sums nothing, not even what every backend has.
        """
        known = self._goes.get(dtype)
        if known is None:
            known = self._goes[dtype] = self._try(dtype)
        return known

    def _try(self, dtype: torch.dtype) -> bool:
        refusal = self._refusal(dtype)
        failed = torch.tensor([int(refusal is not None)])
        self._agree(failed)
        if not failed.item():
            return True
        if dtype is not torch.float32 and self.goes(torch.float32):
            if self._ranks[0] == dist.get_rank():
                log.warning(
                    "%s: %s does not sum %s (%s); %s sum it by way of the host, which waits for it",
                    *(self._device.type, self._device.backend, dtype),
                    *(refusal or "another rank says", rank_names(self._ranks)),
                )
            return False
        raise ConfigError(
            f"comm.backend: expected {self._device.backend} to sum {dtype} over "
            f"{rank_names(self._ranks)}, got {refusal or 'an error of another rank'}; use "
            f"{setting('comm.backend', 'gloo')}, which goes by way of the host"
        )

    def _refusal(self, dtype: torch.dtype) -> str | None:
        """Return what the backend says to a sum of one element; None if it sums it."""
        try:
            one = torch.zeros(1, dtype=dtype, device=self._device.torch)
            dist.all_reduce(one, group=self._group)
            self._device.synchronize()
        except (RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None


def widened(tensor: Tensor, reduce: Callable[[Tensor], None]) -> None:
    """Reduce a tensor of the host in place, by way of int64 where Gloo lacks its dtype."""
    if tensor.dtype not in NARROW:
        reduce(tensor)
        return
    wide = tensor.to(torch.int64)
    reduce(wide)
    tensor.copy_(wide)


NARROW: Final = frozenset({torch.bool, torch.int16, torch.uint16, torch.uint32})
"""Gloo has no sum for these."""
