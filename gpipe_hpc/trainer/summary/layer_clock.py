"""How long the forward of each layer takes on a rank, over a few steps."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from torch import nn

from gpipe_hpc.device.deferred import Mark, seconds_between, take_mark
from gpipe_hpc.device.device import Device

_NUM_STEPS: Final = 3  # that are watched, behind the first, which prepares what others find ready


class LayerTime(NamedTuple):
    """The mean of a layer's forwards on one rank, recomputed ones too; `layer`: its number."""

    layer: int
    forward_s: float


class LayerClock:
    """Watches the layers of a rank in steps 2 to 4 of a start; later ones take no more time.

    Without layers it watches nothing.
    """

    def __init__(self, layers: Mapping[int, nn.Module], device: Device) -> None:
        self._layers, self._device = layers, device
        self._num_seen = 0
        self._spans: dict[int, list[tuple[Mark, Mark]]] = {index: [] for index in layers}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return the block in which a step of training runs."""
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
        began[index] = take_mark(self._device)

    def _end(self, began: dict[int, Mark], index: int, *_: Any) -> None:
        self._spans[index].append((began[index], take_mark(self._device)))

    def times(self) -> tuple[LayerTime, ...]:
        """Return the mean of each layer that has run; on an accelerator that waits for its end."""
        return tuple(
            LayerTime(index, sum(seconds_between(*span) for span in spans) / len(spans))
            for index, spans in self._spans.items()
            if spans
        )
