"""What layers and losses report while they run: further losses, metrics, statistics.

A layer calls `add_loss` or `add_metric` in its forward; whoever runs it with `reporting` gets what
was reported, on the rank and for the micro-batch at hand. Without, reports go nowhere.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from gpipe_hpc.errors import ModelError

MAIN_LOSS: Final = "main"
"""The part of the loss that the loss function gives."""

Number = Tensor | float


@dataclass
class Reports:
    """What one run of layers reported.

    `losses`: sums by name, with graph; `metrics`: (sum, weight) by name, without graph;
    `statistics`: what modules record of their inputs, by module.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, tuple[Number, Number]] = field(default_factory=dict)
    statistics: list[tuple[Any, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Say whether anything was reported."""
        return bool(self.losses or self.metrics or self.statistics)

    def take(self) -> "Reports":
        """Return what was reported since the last call, and reset."""
        taken = Reports(self.losses, self.metrics, self.statistics)
        self.losses, self.metrics, self.statistics = {}, {}, []
        return taken


CURRENT_REPORTS: Final = ContextVar[Reports | None]("gpipe_hpc_reports", default=None)
"""Where reports go: bound for the run of one micro-batch, in the thread that runs it."""


def add_loss(name: str, total: Tensor) -> None:
    """Add `total`, a 0-dim sum over the micro-batch, to the loss of the step, from any layer.

    The loss is (sum of all losses) / (global weight of the main loss). To weigh a mean over samples
    like the main loss, multiply it by the number of samples. Losses of one name are summed, and
    reported by name.
    """
    if name == MAIN_LOSS:
        raise ModelError(
            f"add_loss({name!r}): expected another name, as this is that of the loss function's "
            f"part, got it; call the loss otherwise"
        )
    if not isinstance(total, Tensor):
        raise ModelError(
            f"add_loss({name!r}): expected a tensor of one number, got {type(total).__name__}; "
            f"give the tensor that was computed, or nothing where there is none"
        )
    _check("add_loss", name, total)
    reports = CURRENT_REPORTS.get()
    if reports is not None:
        total = total.reshape(())
        before = reports.losses.get(name)
        reports.losses[name] = total if before is None else before + total


def add_metric(name: str, total: Number, weight: Number = 1.0) -> None:
    """Report a metric that is not trained on: its mean over the step is sum / weight.

    Sums and weights of one name are added over layers, micro-batches and replicas.
    """
    _check("add_metric", name, total)
    _check("add_metric", name, weight)
    reports = CURRENT_REPORTS.get()
    if reports is not None:
        before = reports.metrics.get(name, (0.0, 0.0))
        reports.metrics[name] = (before[0] + _plain(total), before[1] + _plain(weight))


class reporting:
    """Collect reports of this thread within the block."""

    __slots__ = ("_reports", "_token")

    def __init__(self, reports: Reports) -> None:
        self._reports = reports

    def __enter__(self) -> Reports:
        """Return what reports go to from now on."""
        self._token = CURRENT_REPORTS.set(self._reports)
        return self._reports

    def __exit__(self, *error: object) -> None:
        """Let them go where they went before."""
        CURRENT_REPORTS.reset(self._token)


def current_reports() -> Reports | None:
    """Return where reports go now; None outside of a pipeline."""
    return CURRENT_REPORTS.get()


def _plain(number: Number) -> Number:
    return number.detach().reshape(()) if isinstance(number, Tensor) else number


def _check(function: str, name: str, number: Number) -> None:
    if isinstance(number, Tensor) and number.numel() != 1:
        raise ModelError(
            f"{function}({name!r}): expected one number, got a tensor of shape "
            f"{tuple(number.shape)}; reduce it by sum()"
        )
