"""All-reduce by the accelerator's own backend if it supports the dtype, else through the host.

NCCL and XCCL sum float64; out-of-tree backends may not (HCCL on some devices supports only 16 and
32 bits), and no backend sums every dtype. An unsupported dtype shows only as an error of the call.
So the first sum of a dtype is tried with one element, before the first step for all dtypes of a
step, and the ranks agree on the result. Unsupported dtypes are summed by Gloo, bitwise equal on all
ranks; the host then blocks.
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


class BackendReductions:
    """Cache of the dtypes that the backend of one group can sum; all ranks make the same calls.

    `agree` sums a host tensor over the ranks, in place.
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
        """Return whether the backend can sum a dtype; the first call for each dtype is collective.

        Raises ConfigError if the backend cannot even sum float32.
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
                    "%s: %s cannot sum %s (%s); %s use a blocking sum in host memory instead",
                    *(self._device.type, self._device.backend, dtype),
                    *(refusal or "reported by another rank", rank_names(self._ranks)),
                )
            return False
        raise ConfigError(
            f"comm.backend: {self._device.backend} failed to sum {dtype} over "
            f"{rank_names(self._ranks)}: {refusal or 'another rank reported an error'}; use "
            f"{setting('comm.backend', 'gloo')}, which copies through host memory"
        )

    def _refusal(self, dtype: torch.dtype) -> str | None:
        """Return the backend's error for a sum of one element; None if it succeeds."""
        try:
            one = torch.zeros(1, dtype=dtype, device=self._device.torch)
            dist.all_reduce(one, group=self._group)
            self._device.synchronize()
        except (RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None


def widened(tensor: Tensor, reduce: Callable[[Tensor], None]) -> None:
    """Reduce a host tensor in place, in int64 if Gloo does not support its dtype."""
    if tensor.dtype not in NARROW:
        reduce(tensor)
        return
    wide = tensor.to(torch.int64)
    reduce(wide)
    tensor.copy_(wide)


NARROW: Final = frozenset({torch.bool, torch.int16, torch.uint16, torch.uint32})
"""Dtypes that Gloo cannot sum."""
