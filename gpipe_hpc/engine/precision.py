"""Precision of layers: autocast over float32 weights and gradient sums, and the loss scale.

The loss scale of float16 is one number for all stages and replicas, known to all after each step.
It is a power of two, so it changes no bit of gradients that neither overflow nor underflow. Source:
Micikevicius et al., Mixed precision training, 2018, section 3.2.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.gradient_norms import stacked
from gpipe_hpc.errors import ConfigError, ModelError, NonFiniteError

PRECISIONS: Final = MappingProxyType(
    {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
)

_AS_IT_IS: Final = nullcontext()
_INITIAL: Final = 2.0**16
_LEAST: Final = 2.0**-16
_MOST: Final = 2.0**24


def casting(
    precision: str, device: Device, *, shared: bool = True
) -> AbstractContextManager[object]:
    """Return a context manager in which forwards compute in `precision`.

    bfloat16 and float16 use torch's autocast: weights and the sums of their gradients keep their
    dtype, boundaries have the dtype of the layers' outputs. float32 uses no autocast. `shared`:
    whether casts of parameters are shared with other such blocks. Raises ConfigError for another
    precision.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision: unknown, expected one of {', '.join(PRECISIONS)}, got {precision!r}; "
            f"choose one of them"
        )
    dtype = PRECISIONS[precision]
    if dtype is None:
        return _AS_IT_IS
    return torch.autocast(device.type, dtype, cache_enabled=shared)


@contextmanager
def keeping_casts(precision: str, device: Device) -> Iterator[None]:
    """Share casts of parameters between all `casting` blocks of one step.

    A weight is then cast once for all micro-batches, and their graphs share the cast. Autocast
    caches the cast of every leaf, including leaves that a reentrant `torch.utils.checkpoint`
    creates from its inputs; these stay allocated until the step ends.
    """
    if PRECISIONS[precision] is None or not casts_keep_their_graph():
        yield
        return
    # torch clears the cache at the end of the outermost block, also of a disabled one. The user may
    # have a block around many steps, whose cache holds casts of weights that have changed since.
    torch.clear_autocast_cache()
    with torch.autocast(device.type, enabled=False):
        yield
        torch.clear_autocast_cache()


class StageCasts:
    """Creates the `casting` blocks of one stage, and discards casts of changed parameters."""

    def __init__(self, precision: str, device: Device, parameters: Iterable[nn.Parameter]) -> None:
        self._precision, self._device = precision, device
        self.is_casting = precision != "float32"
        self._parameters = [] if precision == "float32" else list(parameters)
        self._last = self._versions()
        self._known: dict[Hashable, bool] = {}  # by place: whether its layers change weights

    def begin(self) -> None:
        """Begin a step, in which autocast's cache is empty."""
        self._last = self._versions()

    @contextmanager
    def block(self, place: Hashable, *, shared: bool) -> Iterator[None]:
        """Return a context manager for a run of the layers at `place`, see `casting`.

        Raises ModelError if they change a parameter that they did not change in their first run.
        """
        before = self._versions()
        if before != self._last:  # changed by a hook of a backward
            torch.clear_autocast_cache()
        with casting(self._precision, self._device, shared=shared):
            yield
        self._last = self._versions()
        if self._last == before:
            self._known.setdefault(place, False)
            return
        if shared and self._known.get(place) is False:
            raise ModelError(
                f"a forward changed a parameter in this micro-batch, but not in the first one, and "
                f"precision {self._precision} casts weights only once for all micro-batches; "
                f"change it in every forward or in none, or use precision float32"
            )
        self._known[place] = True
        torch.clear_autocast_cache()

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]


@cache
def casts_keep_their_graph() -> bool:
    """Return whether autocast records a cast again if its cached cast has no graph.

    torch up to 2.10 returns the cached cast without a graph, so the weight would get no gradient.
    """
    weight = torch.ones(1, 1, requires_grad=True)
    x = torch.ones(1, 1)
    casts = torch.autocast("cpu", torch.bfloat16)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        with torch.no_grad(), casts:
            torch.mm(x, weight)
        with torch.enable_grad(), casts:
            return torch.mm(x, weight).requires_grad


class LossScale:
    """The factor of the loss that keeps small gradients from underflowing in float16.

    Halved when a gradient overflowed, doubled after `growth_interval` consecutive steps without
    overflow.
    """

    def __init__(self, growth_interval: int = 2000) -> None:
        self.value = _INITIAL
        self.num_skipped = 0  # steps, since the run began
        self._growth_interval = growth_interval
        self._num_good = 0

    def update(self, *, overflowed: bool) -> None:
        """Adapt the scale after a step; raise NonFiniteError if no scale avoids overflow."""
        if not overflowed:
            self._num_good += 1
            if self._num_good >= self._growth_interval:
                self.value, self._num_good = min(_MOST, self.value * 2), 0
            return
        self.num_skipped += 1
        self._num_good = 0
        if self.value <= _LEAST:
            raise NonFiniteError(
                f"loss scale: gradients are not finite at any loss scale from {_INITIAL:g} down to "
                f"{_LEAST:g}; lower optimizer.lr, check the data of this step, or use "
                f"train.precision=bfloat16"
            )
        self.value /= 2

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {
            "value": self.value,
            "num_good": self._num_good,
            "num_skipped": self.num_skipped,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self.value = float(state["value"])
        self._num_good = int(state["num_good"])
        self.num_skipped = int(state["num_skipped"])


def count_overflows(gradients: Iterable[torch.Tensor], device: Device) -> torch.Tensor:
    """Return the number of gradients with an infinity or NaN, float64[] on the device.

    Gradients are summed, and not divided by the scale yet. Does not wait for the device.
    """
    present = [gradient for gradient in gradients if gradient.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device.torch)
    peaks = stacked(torch._foreach_norm(present, torch.inf))
    return torch.isfinite(peaks).logical_not_().sum().double()
