"""In which precision layers compute: autocast over float32 weights and gradient sums."""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.sums.loss_scale import LossScale
from gpipe_hpc.errors import ConfigError, ModelError

PRECISIONS: Final = MappingProxyType(
    {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
)

_AS_IT_IS: Final = nullcontext()


def check_precision(precision: str) -> None:
    """Raise ConfigError if nobody knows a precision."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision: unknown, expected one of {', '.join(PRECISIONS)}, got {precision!r}; "
            f"choose one of them"
        )


def casting(
    precision: str, device: Device, *, shared: bool = True
) -> AbstractContextManager[object]:
    """Return a block within which forwards compute in `precision`.

    bfloat16, float16: torch's autocast. Weights stay as they are, and so do the sums of their
    gradients; boundaries have whatever dtype the layers give. float32: everything as the layers
    have it. `shared`: whether casts of parameters may be those of other such blocks.
    """
    check_precision(precision)
    dtype = PRECISIONS[precision]
    if dtype is None:
        return _AS_IT_IS
    return torch.autocast(device.type, dtype, cache_enabled=shared)


@contextmanager
def keeping_casts(precision: str, device: Device) -> Iterator[None]:
    """Let all `casting` blocks within share their casts of parameters: for one step.

    A weight is then cast once for all micro-batches, not once for each, and their graphs hold one
    copy of it. Autocast keeps the cast of every leaf, also of those that a reentrant
    `torch.utils.checkpoint` makes of its inputs: those live until the step ends.
    """
    if PRECISIONS[precision] is None or not casts_keep_their_graph():
        yield
        return
    # torch forgets casts at the end of the outermost block, also of one that casts nothing. The
    # user may have one around many steps, with casts of weights that have changed since.
    torch.clear_autocast_cache()
    with torch.autocast(device.type, enabled=False):
        yield
        torch.clear_autocast_cache()


class StageCasts:
    """The `casting` blocks of one stage: no forward computes with casts of what has changed."""

    def __init__(self, precision: str, device: Device, parameters: Iterable[nn.Parameter]) -> None:
        self._precision, self._device = precision, device
        self.is_casting = precision != "float32"
        self._parameters = [] if precision == "float32" else list(parameters)
        self._last = self._versions()
        self._known: dict[Hashable, bool] = {}  # whether this place changes its own weights

    def begin(self) -> None:
        """Begin a step: no cast is kept yet."""
        self._last = self._versions()

    def block(self, place: Hashable, *, shared: bool = True) -> AbstractContextManager[object]:
        """Return the block for a run of the layers at a place, as `casting` does.

        Raises ModelError if they change a parameter that they left alone in their first run.
        """
        if self._precision == "float32":
            return _AS_IT_IS
        return self._watched(place, shared=shared)

    @contextmanager
    def _watched(self, place: Hashable, *, shared: bool) -> Iterator[None]:
        before = self._versions()
        if before != self._last:  # by a hook amid the backwards
            torch.clear_autocast_cache()
        with casting(self._precision, self._device, shared=shared):
            yield
        self._last = self._versions()
        if self._last == before:
            self._known.setdefault(place, False)
            return
        if shared and self._known.get(place) is False:
            raise ModelError(
                f"a layer changed a parameter in its forward in this micro-batch, expected that "
                f"in the first one or never, as {self._precision} casts weights once for all; "
                f"change it in every forward or outside of them, or use precision float32"
            )
        self._known[place] = True
        torch.clear_autocast_cache()

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]


@cache
def casts_keep_their_graph() -> bool:
    """Say whether a cast first made without a graph serves a forward with one.

    Torch up to 2.10 hands out the same detached cast: the weight would get no gradient.
    """
    weight = torch.ones(1, 1, requires_grad=True)
    x = torch.ones(1, 1)
    casts = torch.autocast("cpu", torch.bfloat16)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        with torch.no_grad(), casts:
            torch.mm(x, weight)
        with torch.enable_grad(), casts:
            return torch.mm(x, weight).requires_grad


def scaling(precision: str) -> LossScale | None:
    """Return the loss scale that a precision needs; None for those with the range of float32."""
    return LossScale() if precision == "float16" else None
