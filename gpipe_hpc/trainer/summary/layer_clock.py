"""Forward times of single layers, measured in a few steps."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from torch import nn

from gpipe_hpc.device.deferred import Mark, record_mark, seconds_between
from gpipe_hpc.device.device import Device

_NUM_STEPS: Final = 3  # timed steps, after the first, which includes initialization


class LayerTime(NamedTuple):
    """Mean forward seconds of layer number `layer` on one rank, including recomputation."""

    layer: int
    forward_s: float


class LayerClock:
    """Timer of the forwards of a rank's layers in steps 2 to 4 of a start.

    It adds no overhead to later steps, and does nothing if `layers` is empty.
    """

    def __init__(self, layers: Mapping[int, nn.Module], device: Device) -> None:
        self._layers, self._device = layers, device
        self._num_seen = 0
        self._spans: dict[int, list[tuple[Mark, Mark]]] = {index: [] for index in layers}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager for a training step; in steps 2 to 4 it adds timing hooks to layers."""
        self._num_seen += 1
        if not 2 <= self._num_seen < 2 + _NUM_STEPS:
            yield
            return
        with ExitStack() as stack:
            began: dict[int, Mark] = {}
            for index, layer in self._layers.items():
                for handle in (
                    layer.register_forward_pre_hook(partial(self._begin, began, index)),
                    layer.register_forward_hook(partial(self._end, began, index)),
                ):
                    stack.callback(handle.remove)
            yield

    def _begin(self, began: dict[int, Mark], index: int, *_: Any) -> None:
        began[index] = record_mark(self._device)

    def _end(self, began: dict[int, Mark], index: int, *_: Any) -> None:
        self._spans[index].append((began[index], record_mark(self._device)))

    def times(self) -> tuple[LayerTime, ...]:
        """Return the mean time of each layer that has run; on an accelerator this synchronizes."""
        return tuple(
            LayerTime(index, sum(seconds_between(*span) for span in spans) / len(spans))
            for index, spans in self._spans.items()
            if spans
        )
