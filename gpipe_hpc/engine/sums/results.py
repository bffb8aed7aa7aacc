"""The loss of a step: summed over micro-batches and replicas, divided once by the weight.

And what layers reported besides: further losses, which are part of it, and metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from gpipe_hpc.comm.group import Group
from gpipe_hpc.engine.sums.loss import LossTerm, Noted
from gpipe_hpc.engine.sums.squares import GradientParts
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
    weights, and what `rows` name. Reading a property waits for the device; nothing before does.
    `squares`: float64[replicas x micro-batches], those of the gradients' parts, if measured.
    """

    terms: torch.Tensor
    rows: tuple[Row, ...] = ()
    squares: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """Return the global weight, float64[] on the device."""
        # cumsum adds from left to right: the global order, whatever the layout.
        return self.terms[1].cumsum(0)[-1]

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

    @cached_property
    def value(self) -> float:
        """Return the loss over the global batch: sum / weight, 0 if the weight is 0."""
        weight = self._totals[1]
        return sum(self.sums.values()) / weight if weight != 0 else 0.0

    @cached_property
    def microbatch_losses(self) -> list[float]:
        """Return the loss of each global micro-batch; NaN shows whose is NaN."""
        sums = self.terms[0]
        for row, at in self._places():
            sums = sums + self.terms[at] if row.is_loss else sums
        pairs = zip(sums.tolist(), self.terms[1].tolist(), strict=True)
        return [s / w if w != 0 else s for s, w in pairs]

    @cached_property
    def _totals(self) -> list[float]:
        totals: list[float] = self.terms.cumsum(1)[:, -1].tolist()
        return totals

    def _places(self) -> list[tuple[Row, int]]:
        return list(zip(self.rows, _positions(self.rows), strict=True))


@dataclass(frozen=True, repr=False)
class StepResult:
    """What a step or an evaluation gave; the same on every rank.

    `is_skipped`: gradients overflowed float16 on some rank, so there are none on any.
    `loss_scale`: what backward was scaled by. `parts`: how much the gradients of the step's parts
    differ, with `noise_over`.
    """

    _loss: StepLoss
    is_skipped: bool = False
    loss_scale: float = 1.0
    parts: GradientParts | None = None

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
        return float(self._loss.weight)

    @property
    def microbatch_losses(self) -> list[float]:
        """Return the loss of each global micro-batch."""
        return self._loss.microbatch_losses


class Exchange:
    """Put together what the ranks know of the losses of a step.

    Each place has one contributor and zeros from everybody else, so the sums are exact. Which
    rows there are, all ranks agree on when one has a row that is new.
    """

    def __init__(self, num_global: int, group: Group, device: torch.device) -> None:
        self._num_global = num_global
        self._group = group
        self._device = device
        self._rows: tuple[Row, ...] = ()

    def __call__(
        self,
        own: Mapping[int, LossTerm],
        noted: Mapping[int, Sequence[Noted]],
        squares: Mapping[int, torch.Tensor] | None = None,
    ) -> StepLoss:
        """Return the loss of the step; all are by global micro-batch.

        `squares` are those of this rank's stages, on all ranks or on none.
        """
        found = _found(noted)
        terms, summed, is_new = self._sum(own, found, squares)
        if is_new:
            everybody = self._group.all_gather_object(sorted(found))
            self._rows = tuple(sorted({*self._rows, *(row for rows in everybody for row in rows)}))
            terms, summed, _ = self._sum(own, found, squares)
        return StepLoss(terms, self._rows, None if squares is None else summed)

    def _sum(
        self,
        own: Mapping[int, LossTerm],
        found: Found,
        squares: Mapping[int, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Return the terms of all ranks, their squares, and whether some rank has new rows."""
        places = dict(zip(self._rows, _positions(self._rows), strict=True))
        num_terms = _num_terms(self._rows) * self._num_global
        num_all = num_terms + (0 if squares is None else self._num_global)
        num_own_new = sum(row not in places for row in found)
        entries: dict[int, torch.Tensor | float] = {num_all: float(num_own_new)}
        entries |= {num_terms + index: square for index, square in (squares or {}).items()}
        for index, term in own.items():
            entries[index] = term.total
            entries[self._num_global + index] = term.weight
        for row, by_microbatch in found.items():
            for index, numbers in by_microbatch.items() if row in places else ():
                for offset, number in enumerate(numbers):
                    entries[(places[row] + offset) * self._num_global + index] = number
        flat = self._flat(entries, num_all + 1)
        self._group.all_reduce(flat)
        num_new = flat[-1:]
        if self._device.type != "cpu":
            # The device is not waited for within a step: this one number travels on the host.
            num_new = torch.tensor([num_own_new])
            self._group.all_reduce(num_new)
        terms = flat[:num_terms].view(-1, self._num_global)
        return terms, flat[num_terms:num_all], int(num_new) > 0

    def _flat(self, entries: Mapping[int, torch.Tensor | float], size: int) -> torch.Tensor:
        """Return float64[size] with these entries, else zeros; a device is not waited for."""
        on_device = {}
        row = [0.0] * size
        for index, number in entries.items():
            if isinstance(number, torch.Tensor) and number.device.type != "cpu":
                on_device[index] = number
            else:
                row[index] = float(number)
        is_pinned = self._device.type == "cuda"
        host = torch.tensor(row, dtype=torch.float64, pin_memory=is_pinned)
        flat = host.to(self._device, non_blocking=True)
        for index, number in on_device.items():
            flat[index] = number
        return flat


def _found(noted: Mapping[int, Sequence[Noted]]) -> Found:
    """Sort what layers reported by row."""
    found: dict[Row, dict[int, tuple[torch.Tensor | float, ...]]] = {}
    for index, layers in noted.items():
        for layer, reports in layers:
            for name, total in reports.losses.items():
                found.setdefault(Row(layer, name, True), {})[index] = (total,)
            for name, pair in reports.metrics.items():
                found.setdefault(Row(layer, name, False), {})[index] = pair
    return found


def _positions(rows: Sequence[Row]) -> list[int]:
    """Return where the numbers of each row begin, behind the main loss and its weight."""
    return list(accumulate((2 - row.is_loss for row in rows[:-1]), initial=2)) if rows else []


def _num_terms(rows: Sequence[Row]) -> int:
    return 2 + sum(2 - row.is_loss for row in rows)
