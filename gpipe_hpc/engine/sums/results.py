"""The loss of a step: summed over micro-batches and replicas, divided once by the weight.

And what layers reported besides: further losses, which are part of it, and metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpipe_hpc.engine.sums.fetched import Fetched
from gpipe_hpc.engine.sums.loss import Noted, refuse_negative_weight
from gpipe_hpc.engine.sums.ordered import OrderedSum
from gpipe_hpc.engine.sums.squares import GradientParts
from gpipe_hpc.engine.sums.told import Overall
from gpipe_hpc.models import MAIN_LOSS


class Row(NamedTuple):
    """What one layer reports under one name: a loss, or a metric with its weight."""

    layer: int
    name: str
    is_loss: bool


Found = Mapping[Row, Mapping[int, Sequence[torch.Tensor | float]]]
"""By row, then by global micro-batch: a loss's sum, or a metric's sum and weight."""


@dataclass(frozen=True)
class StepLoss:
    """The loss of a global batch; the same on every rank.

    `terms` is float64[rows, replicas x micro-batches] in global order: sums of the main loss, its
    weights, and what `rows` name. `fetched`: the same, one behind the other, on their way to the
    host; what reads them waits for the device, nothing else does. `add`: how numbers of the device
    are summed. `squares`: float64[replicas x micro-batches], those of the gradients' parts, if
    measured. `is_sum`: the loss is the sum itself, of weight 1; the weights are then samples.
    `on_read`: called when the numbers are read.
    """

    terms: torch.Tensor
    fetched: Fetched
    add: OrderedSum
    rows: tuple[Row, ...] = ()
    squares: torch.Tensor | None = None
    is_sum: bool = False
    on_read: Callable[[], None] | None = None

    @cached_property
    def weight(self) -> torch.Tensor:
        """Return the global weight, float64[] on the device; summed in the global order."""
        weight = self.add(self.terms[1])
        return torch.ones_like(weight) if self.is_sum else weight

    def weight_of(self, microbatches: range) -> torch.Tensor:
        """Return the weight of some of the global micro-batches, float64[] on the device."""
        weight = self.add(self.terms[1, microbatches.start : microbatches.stop])
        return weight / self.add(self.terms[1]) if self.is_sum else weight

    def weights_of(self, places: torch.Tensor) -> torch.Tensor:
        """Return the weight of each of the `shares`, float64[shares] on the device."""
        return self.add(F.pad(self.terms[1], (0, 1))[places])

    @cached_property
    def known_weight(self) -> float:
        """Return the global weight; ModelError if it is negative."""
        weight = 1.0 if self.is_sum else self._totals[1]
        refuse_negative_weight(weight)
        return weight

    @cached_property
    def sums(self) -> dict[str, float]:
        """Return the sum of each part of the loss over the global batch, the main one first."""
        parts = {MAIN_LOSS: self._totals[0]}
        for row, at in self._places():
            if row.is_loss:
                parts[row.name] = parts.get(row.name, 0.0) + self._totals[at]
        return parts

    @cached_property
    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return the sum and the weight of each metric over the global batch."""
        metrics: dict[str, tuple[float, float]] = {}
        for row, at in self._places():
            if not row.is_loss:
                total, weight = metrics.get(row.name, (0.0, 0.0))
                metrics[row.name] = (total + self._totals[at], weight + self._totals[at + 1])
        return metrics

    def is_zero(self, microbatches: range) -> bool:
        """Say whether some of the global micro-batches add exactly nothing to any loss."""
        terms = self._on_host[:, microbatches.start : microbatches.stop]
        return not any(terms[at].any() for at in (0, *(i for r, i in self._places() if r.is_loss)))

    @cached_property
    def value(self) -> float:
        """Return the loss over the global batch: sum / weight, 0 if the weight is 0."""
        weight = self.known_weight
        return sum(self.sums.values()) / weight if weight != 0 else 0.0

    @cached_property
    def microbatch_losses(self) -> list[float]:
        """Return the loss of each global micro-batch; NaN shows whose is NaN."""
        terms = self._on_host
        sums = terms[0]
        for row, at in self._places():
            sums = sums + terms[at] if row.is_loss else sums
        weights = torch.ones_like(terms[1]) if self.is_sum else terms[1]
        pairs = zip(sums.tolist(), weights.tolist(), strict=True)
        return [s / w if w != 0 else s for s, w in pairs]

    @property
    def _on_host(self) -> torch.Tensor:
        values = self.fetched.read().view(self.terms.shape)
        if self.on_read is not None:
            self.on_read()
        return values

    @cached_property
    def _totals(self) -> list[float]:
        # On a CPU cumsum adds from left to right: the global order, whatever the layout.
        totals: list[float] = self._on_host.cumsum(1)[:, -1].tolist()
        return totals

    def _places(self) -> list[tuple[Row, int]]:
        return list(zip(self.rows, positions(self.rows), strict=True))


@dataclass(frozen=True, repr=False)
class StepResult:
    """What a step or an evaluation gave; the same on every rank.

    `is_skipped`: gradients overflowed float16 on some rank, so there are none on any.
    `loss_scale`: what backward was scaled by. `parts`: how much the gradients of the step's parts
    differ, with `noise_over`. `told`: the numbers that ranks told, in sum; None of an
    evaluation. `met_s`:
    when this rank left the meeting behind the pipeline, on its own clock.
    """

    _loss: StepLoss
    is_skipped: bool = False
    loss_scale: float = 1.0
    parts: GradientParts | None = None
    told: Overall | None = None
    met_s: float = 0.0

    def __repr__(self) -> str:
        numbers = {**self.scalars(), "weight": self.weight}
        text = ", ".join(f"{name}={value:.6g}" for name, value in numbers.items())
        return f"StepResult({text}{', is_skipped=True' if self.is_skipped else ''})"

    def scalars(self) -> dict[str, float]:
        """Return what a line of metrics says: `loss`, its parts if several, and the metrics."""
        parts = self.losses
        shown = {f"losses/{name}": value for name, value in parts.items()} if len(parts) > 1 else {}
        return {
            "loss": self.loss,
            **shown,
            **{f"metrics/{name}": value for name, value in self.metrics.items()},
        }

    @property
    def loss(self) -> float:
        """Return the loss over the global batch: all parts summed, divided once by the weight."""
        return self._loss.value

    @property
    def losses(self) -> dict[str, float]:
        """Return the parts of the loss: `main`, and what layers added by `add_loss`, by name."""
        weight = self.weight
        return {n: s / weight if weight != 0 else 0.0 for n, s in self._loss.sums.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the global batch, by name."""
        return {name: s / w for name, (s, w) in self._loss.metrics.items() if w != 0}

    @property
    def metric_sums(self) -> dict[str, tuple[float, float]]:
        """Return the sum and the weight of each metric, to be added up over several batches."""
        return dict(self._loss.metrics)

    @property
    def weight(self) -> float:
        """Return what the sum was divided by: samples, or tokens not ignored."""
        return self._loss.known_weight

    @property
    def microbatch_losses(self) -> list[float]:
        """Return the loss of each global micro-batch."""
        return self._loss.microbatch_losses


def find_rows(noted: Mapping[int, Sequence[Noted]]) -> Found:
    """Sort what layers reported by row."""
    found: dict[Row, dict[int, tuple[torch.Tensor | float, ...]]] = {}
    for index, layers in noted.items():
        for layer, reports in layers:
            for name, total in reports.losses.items():
                found.setdefault(Row(layer, name, True), {})[index] = (total,)
            for name, pair in reports.metrics.items():
                found.setdefault(Row(layer, name, False), {})[index] = pair
    return found


def positions(rows: Sequence[Row]) -> list[int]:
    """Return where the numbers of each row begin, behind the main loss and its weight."""
    return list(accumulate((2 - row.is_loss for row in rows[:-1]), initial=2)) if rows else []


def shares(counts: Sequence[int]) -> torch.Tensor:
    """Return where in a row of numbers those of each share lie, int64[most of a share, shares].

    `counts`: how many numbers a share has; they follow one another. Where one has fewer than
    another it has a place behind the row instead.
    """
    own = torch.tensor(counts)
    within = torch.arange(max(counts)).unsqueeze(1)
    return torch.where(within < own, own.cumsum(0) - own + within, sum(counts))


def num_terms(rows: Sequence[Row]) -> int:
    """Return how many numbers there are of each micro-batch."""
    return 2 + sum(2 - row.is_loss for row in rows)
