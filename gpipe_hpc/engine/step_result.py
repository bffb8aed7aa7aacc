"""The result of a step: losses and metrics, summed over micro-batches and replicas.

The sum of the loss is divided once, by the global weight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_hpc.comm.collectives.rank_summary import RankSummary
from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.gradient_norms import GradientParts
from gpipe_hpc.engine.loss import LayerReports, refuse_negative_weight
from gpipe_hpc.models import MAIN_LOSS


class LossRow(NamedTuple):
    """A loss or a metric that one layer adds under one name."""

    layer: int
    name: str
    is_loss: bool


TermsByRow = Mapping[LossRow, Mapping[int, Sequence[Tensor | float]]]
"""The sum of a loss, or sum and weight of a metric, by row and global micro-batch."""


OrderedSum = Callable[[Tensor], Tensor]
"""Returns the sum over the first dimension, from float64[n] or float64[n, m].

It adds from left to right, as a plain loop does, so the result has the same bits on every device.
"""

_NUM_PROBED: Final = 4099


def ordered_sum(device: Device) -> OrderedSum:
    """Return a function that sums from left to right on a device.

    `torch.cumsum` does so on a CPU. On an accelerator it uses another order and is not allowed
    under `torch.use_deterministic_algorithms`; there, a test run finds whether one kernel keeps the
    order. The test waits for the device.
    """
    if not device.is_accelerator:
        return _by_prefixes
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(-20, 20, (_NUM_PROBED,), generator=generator).double().exp2()
    numbers = torch.randn(_NUM_PROBED, generator=generator, dtype=torch.float64) * spread
    columns = torch.stack([numbers, numbers.flip(0)], 1)
    try:
        found = [device.to_host(_by_bag(device.to_device(each))) for each in (numbers, columns)]
    except RuntimeError:  # it has no such kernel
        return _one_by_one
    expected = [_by_prefixes(each) for each in (numbers, columns)]
    return _by_bag if all(map(torch.equal, found, expected)) else _one_by_one


def _by_prefixes(numbers: Tensor) -> Tensor:
    return numbers.cumsum(0)[-1]


def _by_bag(numbers: Tensor) -> Tensor:
    """Sum rows as one embedding bag: on CUDA one thread for each column adds row after row."""
    count = len(numbers)
    order = torch.arange(count, device=numbers.device).view(1, count)
    summed = F.embedding_bag(order, numbers.reshape(count, -1), mode="sum")
    return summed.view(numbers.shape[1:])


def _one_by_one(numbers: Tensor) -> Tensor:
    total, *others = numbers.unbind()
    for number in others:
        total = total + number
    return total


@dataclass(frozen=True)
class StepLoss:
    """The loss of a global batch; the same on every rank.

    Args:
        terms: float64[rows, global micro-batches]: sums of the main loss, its weights, and the
            terms of `rows`.
        fetched: `terms`, flat, copied to the host. Only reading them waits for the device.
        add: Sums numbers on the device from left to right.
        rows: Losses and metrics that layers added besides the main loss.
        squares: float64[global micro-batches], squared norms of parts of the gradients, if
            measured.
        is_sum: The loss is the sum itself, with weight 1; weights are numbers of samples.
        on_read: Called when the numbers are read.
    """

    terms: Tensor
    fetched: AsyncHostTensor
    add: OrderedSum
    rows: tuple[LossRow, ...] = ()
    squares: Tensor | None = None
    is_sum: bool = False
    on_read: Callable[[], None] | None = None

    @cached_property
    def weight(self) -> Tensor:
        """Return the global weight, float64[] on the device; summed in the global order."""
        weight = self.add(self.terms[1])
        return torch.ones_like(weight) if self.is_sum else weight

    def weight_of(self, microbatches: range) -> Tensor:
        """Return the weight of a range of global micro-batches, float64[] on the device."""
        weight = self.add(self.terms[1, microbatches.start : microbatches.stop])
        return weight / self.add(self.terms[1]) if self.is_sum else weight

    def weights_of(self, places: Tensor) -> Tensor:
        """Return the weight of each share (see `share_places`), float64[shares] on the device."""
        return self.add(F.pad(self.terms[1], (0, 1))[places])

    @cached_property
    def known_weight(self) -> float:
        """Return the global weight; ModelError if it is negative."""
        weight = 1.0 if self.is_sum else self._totals[1]
        refuse_negative_weight(weight)
        return weight

    @cached_property
    def sums(self) -> dict[str, float]:
        """Return the sum of each loss over the global batch by name, the main loss first."""
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
        """Return whether every loss of a range of global micro-batches is exactly 0."""
        terms = self._on_host[:, microbatches.start : microbatches.stop]
        return not any(terms[at].any() for at in (0, *(i for r, i in self._places() if r.is_loss)))

    @cached_property
    def value(self) -> float:
        """Return the loss over the global batch: sum / weight, 0 if the weight is 0."""
        weight = self.known_weight
        return sum(self.sums.values()) / weight if weight != 0 else 0.0

    @cached_property
    def microbatch_losses(self) -> list[float]:
        """Return the loss of each global micro-batch, to locate a NaN."""
        terms = self._on_host
        sums = terms[0]
        for row, at in self._places():
            sums = sums + terms[at] if row.is_loss else sums
        weights = torch.ones_like(terms[1]) if self.is_sum else terms[1]
        pairs = zip(sums.tolist(), weights.tolist(), strict=True)
        return [s / w if w != 0 else s for s, w in pairs]

    @property
    def _on_host(self) -> Tensor:
        values = self.fetched.read().view(self.terms.shape)
        if self.on_read is not None:
            self.on_read()
        return values

    @cached_property
    def _totals(self) -> list[float]:
        # On a CPU cumsum adds from left to right: the global order, whatever the layout.
        totals: list[float] = self._on_host.cumsum(1)[:, -1].tolist()
        return totals

    def _places(self) -> list[tuple[LossRow, int]]:
        return list(zip(self.rows, row_positions(self.rows), strict=True))


@dataclass(frozen=True, repr=False)
class StepResult:
    """Result of a step or an evaluation, the same on every rank.

    Attributes:
        is_skipped: Gradients overflowed float16 on some rank and were dropped on all.
        loss_scale: Factor by which the loss was scaled before the backward.
        parts: With `noise_over`, squared norms of parts of the gradients.
        rank_summary: Summary of the numbers that ranks reported; None after an evaluation.
        synced_at_s: Time on this rank's clock at which it left the reduction of the step.
    """

    _loss: StepLoss
    is_skipped: bool = False
    loss_scale: float = 1.0
    parts: GradientParts | None = None
    rank_summary: RankSummary | None = None
    synced_at_s: float = 0.0

    def __repr__(self) -> str:
        numbers = {**self.scalars(), "weight": self.weight}
        text = ", ".join(f"{name}={value:.6g}" for name, value in numbers.items())
        return f"StepResult({text}{', is_skipped=True' if self.is_skipped else ''})"

    def scalars(self) -> dict[str, float]:
        """Return the numbers of a metrics line: `loss`, its parts if several, and the metrics."""
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
        """Return the parts of the loss by name: `main`, and the losses that `add_loss` added."""
        weight = self.weight
        return {n: s / weight if weight != 0 else 0.0 for n, s in self._loss.sums.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the global batch, by name."""
        return {name: s / w for name, (s, w) in self._loss.metrics.items() if w != 0}

    @property
    def metric_sums(self) -> dict[str, tuple[float, float]]:
        """Return sum and weight of each metric, which can be added over several batches."""
        return dict(self._loss.metrics)

    @property
    def weight(self) -> float:
        """Return the divisor of the loss: the number of samples, or of tokens not ignored."""
        return self._loss.known_weight

    @property
    def microbatch_losses(self) -> list[float]:
        """Return the loss of each global micro-batch."""
        return self._loss.microbatch_losses


def terms_by_row(noted: Mapping[int, Sequence[LayerReports]]) -> TermsByRow:
    """Group the reports of layers by row."""
    found: dict[LossRow, dict[int, tuple[Tensor | float, ...]]] = {}
    for index, layers in noted.items():
        for layer, reports in layers:
            for name, total in reports.losses.items():
                found.setdefault(LossRow(layer, name, True), {})[index] = (total,)
            for name, pair in reports.metrics.items():
                found.setdefault(LossRow(layer, name, False), {})[index] = pair
    return found


def row_positions(rows: Sequence[LossRow]) -> list[int]:
    """Return the first index of each row, after the main loss and its weight."""
    return list(accumulate((2 - row.is_loss for row in rows[:-1]), initial=2)) if rows else []


def share_places(counts: Sequence[int]) -> Tensor:
    """Return the indices of each share's numbers in a row, int64[largest share, shares].

    `counts`: the number of consecutive entries of each share. Smaller shares are padded with the
    index after the row.
    """
    own = torch.tensor(counts)
    within = torch.arange(max(counts)).unsqueeze(1)
    return torch.where(within < own, own.cumsum(0) - own + within, sum(counts))


def num_terms(rows: Sequence[LossRow]) -> int:
    """Return the number of terms of each micro-batch."""
    return 2 + sum(2 - row.is_loss for row in rows)
