"""Values that layers and losses report in a forward: additional losses, metrics, statistics.

A layer calls `add_loss` or `add_metric` in its forward. A caller that runs the layer within
`reporting` collects these for the current micro-batch. Outside of `reporting` they are ignored.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from gpipe_hpc.errors import ModelError

MAIN_LOSS: Final = "main"
"""Name of the part of the loss that the loss function returns."""

Number = Tensor | float


@dataclass
class Reports:
    """Values that layers reported while they ran.

    Attributes:
        losses: sums by name, with autograd graph.
        metrics: (sum, weight) by name, without graph.
        statistics: (module, statistics of its input) pairs.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, tuple[Number, Number]] = field(default_factory=dict)
    statistics: list[tuple[Any, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is any report."""
        return bool(self.losses or self.metrics or self.statistics)

    def take(self) -> "Reports":
        """Return the values reported since the last call, and clear them."""
        taken = Reports(self.losses, self.metrics, self.statistics)
        self.losses, self.metrics, self.statistics = {}, {}, []
        return taken


CURRENT_REPORTS: Final = ContextVar[Reports | None]("gpipe_hpc_reports", default=None)
"""Collector of reports, set while a micro-batch runs, in the thread that runs it."""


def add_loss(name: str, total: Tensor) -> None:
    """Add `total`, a 0-dim sum over the micro-batch, to the loss of the step, from any layer.

    The loss of the step is the sum of all losses divided by the global weight of the main loss. To
    give a mean over samples the same weight as the main loss, multiply it by the number of samples.
    Losses with the same name are summed and reported under that name.

    Raises:
        ModelError: the name is reserved, or `total` is not a tensor with one element.
    """
    if name == MAIN_LOSS:
        raise ModelError(
            f"add_loss({name!r}): the name is reserved for the result of the loss function; use "
            f"another name"
        )
    if not isinstance(total, Tensor):
        raise ModelError(
            f"add_loss({name!r}): expected a tensor with one element, got {type(total).__name__}; "
            f"pass the computed tensor, or do not call add_loss if there is none"
        )
    _check("add_loss", name, total)
    reports = CURRENT_REPORTS.get()
    if reports is not None:
        total = total.reshape(())
        before = reports.losses.get(name)
        reports.losses[name] = total if before is None else before + total


def add_metric(name: str, total: Number, weight: Number = 1.0) -> None:
    """Report a metric that is not trained on; its value over the step is total / weight.

    Totals and weights of one name are summed over layers, micro-batches and replicas. Both are
    numbers or tensors with one element.
    """
    _check("add_metric", name, total)
    _check("add_metric", name, weight)
    reports = CURRENT_REPORTS.get()
    if reports is not None:
        before = reports.metrics.get(name, (0.0, 0.0))
        reports.metrics[name] = (before[0] + _plain(total), before[1] + _plain(weight))


class reporting:
    """Context manager that collects the values that layers report in this thread."""

    __slots__ = ("_reports", "_token")

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def __enter__(self) -> Reports:
        """Start collecting, and return the collector."""
        self._token = CURRENT_REPORTS.set(self._reports)
        return self._reports

    def __exit__(self, *error: object) -> None:
        """Restore the previous collector."""
        CURRENT_REPORTS.reset(self._token)


def current_reports() -> Reports | None:
    """Return the collector of this thread, or None if no `reporting` context is active."""
    return CURRENT_REPORTS.get()


def _plain(number: Number) -> Number:
    return number.detach().reshape(()) if isinstance(number, Tensor) else number


def _check(function: str, name: str, number: Number) -> None:
    if isinstance(number, Tensor) and number.numel() != 1:
        raise ModelError(
            f"{function}({name!r}): expected one number, got a tensor of shape "
            f"{tuple(number.shape)}; reduce it by sum()"
        )
