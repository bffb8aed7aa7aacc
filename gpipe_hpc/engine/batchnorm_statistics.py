"""Running statistics of a stage's BatchNorm layers: pooled over a whole step, updated once."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import or_
from typing import Any, Final

import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import CollectiveHandle, ControlGroup, Group
from gpipe_hpc.models import Conversion, Moments, PooledBatchNorm, pooled, shifted_sums

log = logging.getLogger("gpipe_hpc.pipeline")
_MAX_SHOWN: Final = 12


class StageStatistics:
    """Sums the statistics of one stage's BatchNorm layers over a step, and updates their buffers.

    All copies of the stage update their buffers from the same float64 sums, so the buffers stay
    equal to the bit.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        modules = {id(part): part for layer in layers for part in layer.modules()}
        self._modules = [
            part
            for part in modules.values()
            if isinstance(part, PooledBatchNorm) and part.running_mean is not None
        ]
        self._noted: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        self._flat: torch.Tensor | None = None
        self._pending: CollectiveHandle | None = None

    def __len__(self) -> int:
        """Return the number of layers with running statistics."""
        return len(self._modules)

    def clear(self) -> None:
        """Begin a step with no statistics."""
        self._noted.clear()
        self._flat = self._pending = None

    def note(self, microbatch: int, statistics: Iterable[tuple[Any, Any]]) -> None:
        """Store the statistics of a micro-batch's forward: pairs (layer, Moments)."""
        self._noted[microbatch] += statistics

    def start_reduction(self, group: Group) -> None:
        """Start the all-reduce over the copies of the stage, after its last forward of the step.

        Only the first call in a step has an effect.
        """
        if not self._modules or self._flat is not None:
            return
        moments: dict[int, list[Moments]] = {}
        for _, noted in sorted(self._noted.items(), key=lambda item: item[0]):
            for layer, each in noted:
                moments.setdefault(id(layer), []).append(each)
        self._flat = torch.cat([_sums(m, moments.get(id(m), [])) for m in self._modules])
        if group.size > 1:
            self._pending = group.start_all_reduce(self._flat)

    def finish(self, *, is_kept: bool = True) -> None:
        """Wait for the sums, and update every layer's buffers if `is_kept`."""
        if self._pending is not None:
            self._pending.wait()
        if self._flat is not None and is_kept:
            sizes = [1 + 2 * module.num_features for module in self._modules]
            for module, sums in zip(self._modules, torch.split(self._flat, sizes), strict=True):
                _update(module, sums)
        self.clear()


def gather_batchnorm(own: Mapping[int, Conversion], pipeline: ControlGroup) -> Conversion:
    """Return the BatchNorm layers of all stages; `own`: those of this rank by stage."""
    by_stage = pipeline.merge_object(dict(own), or_)
    return Conversion.of(by_stage[index] for index in sorted(by_stage))


def log_batchnorm(found: Conversion) -> None:
    """Log the layers whose statistics are pooled, and warn about other BatchNorm classes."""
    if found.converted:
        log.info("BatchNorm over micro-batches: %s", _shortened(found.converted))
    if found.left:
        log.warning(
            "%s: running statistics treat each micro-batch as a batch, as only nn.BatchNorm1d, 2d "
            "and 3d are converted, not subclasses or other classes; use one of these, or "
            "track_running_stats=False",
            _shortened(found.left),
        )


def _shortened(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN])
    return shown if len(names) <= _MAX_SHOWN else f"{shown}, ... ({len(names)} in all)"


def _sums(layer: PooledBatchNorm, moments: list[Moments]) -> torch.Tensor:
    assert layer.running_mean is not None, "only layers that track are among a stage's"
    if moments:
        return shifted_sums(moments, layer.running_mean)
    size = 1 + 2 * layer.num_features
    return torch.zeros(size, dtype=torch.float64, device=layer.running_mean.device)


def _update(layer: PooledBatchNorm, sums: torch.Tensor) -> None:
    """Move a layer's buffers towards the step's statistics, as `nn.BatchNorm` does for a batch."""
    assert layer.running_mean is not None and layer.running_var is not None
    mean, squares, count = pooled(sums, layer.running_mean)
    # Unused layers keep their values; reading from the device which are unused would wait.
    is_used = count > 0
    share: float | torch.Tensor = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(is_used)
        if layer.momentum is None:  # the average over all steps
            share = 1.0 / layer.num_batches_tracked.double()
    news = ((layer.running_mean, mean), (layer.running_var, squares / (count - 1)))
    for buffer, new in news:
        old = buffer.double()
        buffer.copy_(torch.where(is_used, old + share * (new - old), old))
