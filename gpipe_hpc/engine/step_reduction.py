"""The all-reduce at the end of a step: loss, weight, counts and flags over all ranks.

All ranks wait here for all others, so none continues after a step that failed on one. It contains:

    terms   per global micro-batch: sum and weight of the loss, what layers reported, squared norms;
            digests of the data; the number of gradients that overflowed. Each number has one
            contributor and zeros from all other ranks, so the sums are exact.
    host    the number of new rows of terms; flags; numbers that ranks report.

On a CPU both are one tensor. With an accelerator, terms are summed on the device and the rest in
parallel on the host, and neither waits for the other.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.comm.collectives.group import ControlGroup, Group
from gpipe_hpc.comm.collectives.rank_summary import RankSlots, RankSummary
from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.gradient_norms import stacked
from gpipe_hpc.engine.loss import LayerReports, LossTerm
from gpipe_hpc.engine.same_data import NUM_DIGESTS
from gpipe_hpc.engine.step_result import (
    LossRow,
    StepLoss,
    TermsByRow,
    num_terms,
    ordered_sum,
    row_positions,
    terms_by_row,
)


class StepFlags:
    """Indices of the flags that ranks combine at the end of a step, the same on every rank.

    The first `NUM_COMMON` flags are for all ranks. The others are for ranks that reduce gradients
    together: one flag for each parameter, set if a micro-batch used it, and some for the buffers of
    each stage.

    Args:
        names: Names of all parameters of the model.
        widths: Number of buffer flags of each stage.
    """

    HAS_CHANGED: Final = 0
    """A rank trains other parameters than in the step before."""
    IS_SUM: Final = 1
    """The loss of a batch is a sum."""
    HAS_WRITTEN: Final = 2
    """A forward wrote into a parameter of which there are copies."""
    NUM_COMMON: Final = 3

    def __init__(self, names: Sequence[str], widths: Sequence[int]) -> None:
        *starts, self.size = accumulate(widths, initial=self.NUM_COMMON + len(names))
        self._numbers = {name: self.NUM_COMMON + number for number, name in enumerate(names)}
        self._starts, self._widths = starts, widths

    @classmethod
    def gathered(
        cls, names: Sequence[str], own: Mapping[int, int], group: ControlGroup
    ) -> "StepFlags":
        """Return the flags of a model; a collective call.

        `own`: the number of buffer flags of each stage of this rank.
        """
        widths = group.merge_object(dict(own), _widest)
        return cls(names, [widths[stage] for stage in sorted(widths)])

    def of_use(self, names: Iterable[str], used: Iterable[bool]) -> set[int]:
        """Return the flags of the parameters that were used."""
        pairs = zip(names, used, strict=True)
        return {self._numbers[name] for name, is_used in pairs if is_used}

    def of_buffers(self, stage: int, flags: Sequence[bool]) -> set[int]:
        """Return the indices of those buffer flags of a stage that are set in `flags`."""
        start = self._starts[stage]
        return {start + offset for offset, is_set in enumerate(flags) if is_set}

    def used(self, names: Iterable[str], flags: Collection[int]) -> list[bool]:
        """Return for each parameter whether any rank used it."""
        return [self._numbers[name] in flags for name in names]

    def is_any_used(self, flags: Collection[int]) -> bool:
        """Return whether any rank used any parameter."""
        return any(number in flags for number in self._numbers.values())

    def buffers(self, stage: int, flags: Collection[int]) -> list[bool]:
        """Return for each buffer flag of a stage whether any of its ranks set it."""
        start = self._starts[stage]
        return [start + offset in flags for offset in range(self._widths[stage])]


def _widest(first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
    return {s: max(first.get(s, 0), second.get(s, 0)) for s in first | second}


def unite_flags(flags: list[bool], group: Group) -> list[bool]:
    """Return each flag combined by logical or over a group; an all-reduce on the host."""
    if group.size == 1 or not flags:
        return flags
    counts = torch.tensor(flags, dtype=torch.int32)
    group.all_reduce(counts)
    return [count > 0 for count in counts.tolist()]


class StepTotals(NamedTuple):
    """Totals over all ranks after the reduction, the same on each rank.

    Args:
        loss: The loss of the global batch.
        flags: Indices of the flags that any rank has set.
        overflows, digests: Sums, copied to the host.
        reported: Summary of the numbers that ranks reported.
        synced_at_s: Time on this rank's clock at which it left the reduction.
    """

    loss: StepLoss
    flags: frozenset[int]
    overflows: AsyncHostTensor
    reported: RankSummary
    synced_at_s: float
    digests: AsyncHostTensor


class StepReduction:
    """The all-reduce at the end of a step.

    If a rank has a new row of terms (a loss or metric that a layer adds), all ranks agree on the
    rows and reduce a second time in that step.

    Args:
        num_global: Number of micro-batches of the global batch.
        num_flags: Size of `StepFlags`.
        group: All ranks.
        rank: The world rank.
        device: Device of the rank.
        pipeline: With local SGD the ranks of this replica, which combine the flags that are not
            common among themselves; else None.
    """

    def __init__(
        self,
        num_global: int,
        num_flags: int,
        group: ControlGroup,
        rank: int,
        device: Device,
        pipeline: ControlGroup | None = None,
    ) -> None:
        self._num_global, self._num_flags = num_global, num_flags
        self._group, self._device, self._pipeline = group, device, pipeline
        # With 1,024 replicas, combining all flags over all ranks would take 2.5 MB a step.
        self._num_common = num_flags if pipeline is None else StepFlags.NUM_COMMON
        self._slots = RankSlots(group, rank)
        self._add = ordered_sum(device)
        self._rows: tuple[LossRow, ...] = ()

    def reduce(
        self,
        losses: Mapping[int, LossTerm],
        noted: Mapping[int, Sequence[LayerReports]] | None = None,
        flags: Collection[int] = (),
        *,
        overflows: Tensor | None = None,
        reported: Sequence[float] = (),
        squares: Mapping[int, Tensor] | None = None,
        digests: Sequence[Tensor | float] = (),
    ) -> StepTotals:
        """Return the totals over all ranks; all ranks call it.

        Args:
            losses: This rank's terms of the loss, by global micro-batch.
            noted: Reports of its layers, by global micro-batch.
            flags: Indices of the flags that it sets.
            overflows: Number of its gradients that are not finite, float64[] on the device.
            reported: At most `NUM_REPORTED` numbers of the rank.
            squares: Squared norms of its parts of the gradients, by global micro-batch; given on
                all ranks or on none.
            digests: `NUM_DIGESTS` numbers that identify its data, or none.
        """
        terms = terms_by_row(noted or {})

        def reduced() -> tuple[Tensor, int, Tensor, Tensor, float]:
            row = self._device_row(losses, terms, overflows, squares, digests)
            return self._exchange(row, self._host_row(terms, flags, reported), self._own(flags))

        summed, num_new, counts, slots, synced_at_s = reduced()
        if num_new:
            rows = self._group.merge_object(sorted(terms), _merged)
            self._rows = tuple(sorted({*self._rows, *rows}))
            summed, _, counts, slots, synced_at_s = reduced()
        fetched = AsyncHostTensor.of(summed, self._device)
        num_rows = num_terms(self._rows)
        values = summed[: -1 - NUM_DIGESTS].view(-1, self._num_global)
        found = frozenset(counts.nonzero().flatten().tolist())
        return StepTotals(
            StepLoss(
                values[:num_rows],
                fetched.part(slice(num_rows * self._num_global)),
                self._add,
                self._rows,
                None if squares is None else values[num_rows],
                is_sum=StepFlags.IS_SUM in found,
            ),
            found,
            fetched.part(slice(-1, None)),
            self._slots.read(slots),
            synced_at_s,
            fetched.part(slice(-1 - NUM_DIGESTS, -1)),
        )

    def _exchange(
        self, terms: Tensor, host: Tensor, own_flags: Tensor
    ) -> tuple[Tensor, int, Tensor, Tensor, float]:
        """Return sums of terms, number of new rows, flags and slots of ranks, and the time."""
        pipeline = self._pipeline
        flags_pending = None if pipeline is None else pipeline.start_all_reduce(own_flags)
        if not self._device.is_accelerator:
            flat = torch.cat([terms, host])
            self._all_reduce_host(flat)
            terms, host = torch.split(flat, [len(terms), len(host)])
        else:
            pending = self._group.start_all_reduce(terms)
            self._all_reduce_host(host)
            pending.wait()
        synced_at_s = time.perf_counter()
        num_new, flags, slots = torch.split(host, [1, self._num_common, self._slots.size])
        if flags_pending is not None:
            flags_pending.wait()
            flags = torch.cat([flags, own_flags])
        return terms, int(num_new), flags, slots, synced_at_s

    def _all_reduce_host(self, flat: Tensor) -> None:
        """All-reduce a tensor on the host that ends with the slots of ranks."""
        slots = flat[-self._slots.size :]
        self._group.all_reduce_hierarchical(flat, partial(self._slots.lift, slots))

    def _device_row(
        self,
        losses: Mapping[int, LossTerm],
        terms: TermsByRow,
        overflows: Tensor | None,
        squares: Mapping[int, Tensor] | None,
        digests: Sequence[Tensor | float],
    ) -> Tensor:
        """Return float64[n]: terms of the loss, squares if any, digests, overflows.

        Does not wait for the device, as host numbers are copied from pinned memory.
        """
        count = self._num_global
        num_rows = num_terms(self._rows)
        size = (num_rows + (squares is not None)) * count + NUM_DIGESTS + 1
        entries: dict[int, Tensor | float] = {}
        for index, term in losses.items():
            entries[index], entries[count + index] = term.total, term.weight
        for row, position in zip(self._rows, row_positions(self._rows), strict=True):
            for index, numbers in terms.get(row, {}).items():
                for offset, number in enumerate(numbers):
                    entries[(position + offset) * count + index] = number
        for index, square in (squares or {}).items():
            entries[num_rows * count + index] = square
        entries |= dict(enumerate(digests, size - 1 - NUM_DIGESTS))
        if overflows is not None:
            entries[size - 1] = overflows
        return self._placed(entries, size)

    def _placed(self, entries: Mapping[int, Tensor | float], size: int) -> Tensor:
        """Return float64[size] on the device with the entries by index, 0 elsewhere."""
        is_accelerator = self._device.is_accelerator
        on_device: dict[int, Tensor] = {}
        row = [0.0] * size
        for place, number in entries.items():
            if is_accelerator and isinstance(number, Tensor) and self._device.holds(number):
                on_device[place] = number
            else:
                row[place] = float(number)
        host = torch.tensor(row, dtype=torch.float64)
        if not is_accelerator:
            return host
        staged = self._device.pinned(host.shape, host.dtype)
        staged.copy_(host)
        flat = self._device.to_device(staged, non_blocking=True)
        for start, run in _runs(on_device):
            flat[start : start + len(run)] = stacked(run)
        return flat

    def _own(self, flags: Collection[int]) -> Tensor:
        """Return as float64[flags] on the host the flags that only this replica combines."""
        row = [0.0] * (self._num_flags - self._num_common)
        for flag in flags:
            if flag >= self._num_common:
                row[flag - self._num_common] = 1.0
        return torch.tensor(row, dtype=torch.float64)

    def _host_row(
        self, terms: TermsByRow, flags: Collection[int], reported: Sequence[float]
    ) -> Tensor:
        """Return float64[n]: the number of new rows, the flags, and the rank's numbers."""
        row = [0.0] * (1 + self._num_common)
        row[0] = float(sum(each not in self._rows for each in terms))
        for flag in flags:
            if flag < self._num_common:
                row[1 + flag] = 1.0
        return torch.tensor(row + self._slots.of(reported), dtype=torch.float64)


def _merged(first: list[LossRow], second: list[LossRow]) -> list[LossRow]:
    return sorted({*first, *second})


def _runs(numbers: Mapping[int, Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield runs of entries at consecutive indices, each with its first index."""
    places = sorted(numbers)
    for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        own = [place for _, place in run]
        yield own[0], [numbers[place].reshape(()) for place in own]
