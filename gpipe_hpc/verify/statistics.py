"""BatchNorm statistics of the plain training: updated once per step, not per micro-batch.

An independent implementation of the documented rule: within a step, every micro-batch is normalised
by itself; the running statistics are updated once, with mean and unbiased variance of all values of
the step, over all micro-batches and replicas.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_hpc.models import PooledBatchNorm, global_name

_PLAIN: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class PlainStatistics:
    """Records the inputs of a model's BatchNorm modules in a step and updates their statistics.

    `copies` maps ranks to copies of each layer, which share parameters.
    """

    def __init__(self, copies: Sequence[Mapping[Any, nn.Module]]) -> None:
        self._is_collecting = False
        self._given: dict[str, list[Tensor]] = {}
        self._copies: dict[str, list[nn.Module]] = {}
        for index, by_holder in enumerate(copies):
            for layer in by_holder.values():
                for name, module in layer.named_modules():
                    if _is_pooled(module):
                        self._watch(global_name(index, name) if name else f"layers.{index}", module)
        self._before: list[tuple[Tensor, Tensor]] = []

    def _watch(self, name: str, module: nn.Module) -> None:
        self._copies.setdefault(name, []).append(module)

        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if self._is_collecting and module.training:
                self._given.setdefault(name, []).append(_moments(inputs[0].detach()))

        module.register_forward_pre_hook(note)

    def pooled_buffers(self, layer: int) -> frozenset[str]:
        """Return the names, within a layer, of the buffers that are running statistics."""
        start = f"layers.{layer}"
        names = [name for name in self._copies if name == start or name.startswith(f"{start}.")]
        kinds = ("running_mean", "running_var", "num_batches_tracked")
        return frozenset(
            f"{name}.{kind}".removeprefix(f"{start}.") for name in names for kind in kinds
        )

    def begin(self) -> None:
        """Start a step: discard recorded inputs and save the buffers."""
        self._given = {}
        modules = [module for copies in self._copies.values() for module in copies]
        self._before = [(b, b.clone()) for module in modules for b in module.buffers()]

    @contextmanager
    def collecting(self, microbatch: int) -> Iterator[None]:
        """Context that records the inputs of BatchNorm modules (used for first forwards only)."""
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False

    def finish(self, *, is_kept: bool) -> None:
        """Undo the updates of single micro-batches; update the statistics once if `is_kept`."""
        for buffer, value in self._before:
            buffer.copy_(value)
        for name, moments in self._given.items() if is_kept else ():
            for module in self._copies[name]:
                _move(module, moments)


def _is_pooled(module: nn.Module) -> bool:
    if type(module) not in _PLAIN and not isinstance(module, PooledBatchNorm):
        return False
    return getattr(module, "running_mean", None) is not None


def _moments(given: Tensor) -> Tensor:
    """Return float64[1 + 2 x channels]: count, and sum and sum of squares of each channel."""
    values = given.double().transpose(0, 1).flatten(1)
    count = values.new_tensor([values.shape[1]])
    return torch.cat([count, values.sum(1), values.square().sum(1)])


def _move(module: Any, moments: Sequence[Tensor]) -> None:
    total = torch.stack(list(moments)).sum(0)
    count, (sums, squares) = total[0], total[1:].view(2, -1)
    mean = sums / count
    variance = (squares - count * mean.square()) / (count - 1)
    module.num_batches_tracked.add_(1)
    share = module.momentum
    if share is None:
        share = 1.0 / float(module.num_batches_tracked)
    for buffer, new in ((module.running_mean, mean), (module.running_var, variance)):
        buffer.copy_(buffer.double() + share * (new - buffer.double()))
