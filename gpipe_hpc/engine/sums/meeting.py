"""What all ranks tell one another behind the pipeline of a step: one sum over all of them.

On a CPU it is one tensor. With an accelerator what lies on the device is summed there, and what
the host knows travels on the host meanwhile: neither waits for the other.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from gpipe_hpc.comm.device import Device
from gpipe_hpc.comm.group import Gathering
from gpipe_hpc.engine.batch.same_data import NUM_DIGESTS
from gpipe_hpc.engine.sums.fetched import Fetched
from gpipe_hpc.engine.sums.flags import Flags
from gpipe_hpc.engine.sums.loss import LossTerm, Noted
from gpipe_hpc.engine.sums.norms import stacked
from gpipe_hpc.engine.sums.ordered import ordered_sum
from gpipe_hpc.engine.sums.results import Found, Row, StepLoss, find_rows, num_terms, positions
from gpipe_hpc.engine.sums.told import Overall, Slots


@dataclass(frozen=True)
class Says:
    """What one rank says.

    `losses` and `noted`: by global micro-batch. `flags`: the numbers of those that are set.
    `overflows`: how many of its gradients are not finite, float64[] on the device. `told`: at most
    `NUM_TOLD` numbers of this rank. `squares`: of this rank's parts of the gradients, by global
    micro-batch, on all ranks or on none. `digests`: of its data, `NUM_DIGESTS` numbers or none.
    """

    losses: Mapping[int, LossTerm]
    noted: Mapping[int, Sequence[Noted]] = field(default_factory=dict)
    flags: Collection[int] = ()
    overflows: torch.Tensor | None = None
    told: Sequence[float] = ()
    squares: Mapping[int, torch.Tensor] | None = None
    digests: Sequence[torch.Tensor | float] = ()


class Known(NamedTuple):
    """What all ranks know then, the same on each.

    `flags`: those set on any rank. `overflows`, `digests`: the sums, on their way to the host.
    `told`: what the ranks tell of themselves, in sum. `left_s`: when this rank left, on its clock.
    """

    loss: StepLoss
    flags: frozenset[int]
    overflows: Fetched
    told: Overall
    left_s: float
    digests: Fetched


class _Summed(NamedTuple):
    terms: torch.Tensor  # what lies on the device, one behind the other
    num_new: int
    flags: torch.Tensor
    told: torch.Tensor
    left_s: float


class Meeting:
    """Where all ranks meet: none goes on behind a step that failed on one.

    `num_global`: micro-batches of the global batch. `num_flags`: the same on every rank.
    `trains_together`: those ranks that unite all flags but the common ones, a pipeline where
    replicas train apart; None: all ranks do, as they do the common ones. Each number but a flag
    and what ranks tell has one contributor and zeros from everybody else, so the sums are exact.
    Which rows of a loss there are, all ranks agree on when one has a row that is new.
    """

    def __init__(
        self,
        num_global: int,
        num_flags: int,
        group: Gathering,
        rank: int,
        device: Device,
        trains_together: Gathering | None = None,
    ) -> None:
        self._num_global, self._num_flags = num_global, num_flags
        self._group, self._device = group, device
        self._apart = trains_together
        # So many of the flags travel to all; the rest do not where replicas train apart.
        self._num_common = Flags.NUM_COMMON if trains_together else num_flags
        self._slots = Slots(group, rank)
        self._add = ordered_sum(device)
        self._rows: tuple[Row, ...] = ()

    def __call__(self, says: Says) -> Known:
        """Return what all say; the same call on every rank."""
        found = find_rows(says.noted)
        summed = self._sum(says, found)
        if summed.num_new:
            rows = self._group.merge_object(sorted(found), _united)
            self._rows = tuple(sorted({*self._rows, *rows}))
            summed = self._sum(says, found)
        fetched = Fetched.of(summed.terms, self._device)
        num_rows = num_terms(self._rows)
        values = summed.terms[: -1 - NUM_DIGESTS].view(-1, self._num_global)
        flags = frozenset(summed.flags.nonzero().flatten().tolist())
        return Known(
            StepLoss(
                values[:num_rows],
                fetched.part(slice(num_rows * self._num_global)),
                self._add,
                self._rows,
                None if says.squares is None else values[num_rows],
                is_sum=Flags.IS_SUM in flags,
            ),
            flags,
            fetched.part(slice(-1, None)),
            self._slots.read(summed.told),
            summed.left_s,
            fetched.part(slice(-1 - NUM_DIGESTS, -1)),
        )

    def _sum(self, says: Says, found: Found) -> _Summed:
        """Return the sums over all ranks of what they say, with the rows that all know of."""
        terms, host = self._terms(says, found), self._host(says, found)
        united = None if self._apart is None else _Uniting(self._own(says), self._apart)
        if not self._device.is_accelerator:
            flat = torch.cat([terms, host])
            self._climb(flat)
            terms, host = torch.split(flat, [len(terms), len(host)])
        else:
            pending = self._group.start_all_reduce(terms)
            self._climb(host)
            pending.wait()
        left_s = time.perf_counter()
        num_new, flags, told = torch.split(host, [1, self._num_common, self._slots.size])
        if united is not None:
            flags = torch.cat([flags, united.wait()])
        return _Summed(terms, int(num_new), flags, told, left_s)

    def _climb(self, flat: torch.Tensor) -> None:
        """Add up what the host knows, whose last part are the slots of what ranks tell."""
        slots = flat[-self._slots.size :]
        self._group.climb(flat, partial(self._slots.lift, slots))

    def _terms(self, says: Says, found: Found) -> torch.Tensor:
        """Return as float64[n] the terms of the loss, squares if any, digests and the overflows.

        No device is waited for: numbers of the host travel there from pinned memory.
        """
        size = (num_terms(self._rows) + (says.squares is not None)) * self._num_global
        size += NUM_DIGESTS + 1
        places = dict(zip(self._rows, positions(self._rows), strict=True))
        entries: dict[int, torch.Tensor | float] = {}
        for index, term in says.losses.items():
            entries[index] = term.total
            entries[self._num_global + index] = term.weight
        for row, by_microbatch in found.items():
            for index, numbers in by_microbatch.items() if row in places else ():
                for offset, number in enumerate(numbers):
                    entries[(places[row] + offset) * self._num_global + index] = number
        for index, square in (says.squares or {}).items():
            entries[num_terms(self._rows) * self._num_global + index] = square
        entries |= dict(enumerate(says.digests, size - 1 - NUM_DIGESTS))
        if says.overflows is not None:
            entries[size - 1] = says.overflows
        on_device = {}
        is_apart = self._device.is_accelerator
        row_of = [0.0] * size
        for index, number in entries.items():
            if isinstance(number, torch.Tensor) and is_apart and self._device.holds(number):
                on_device[index] = number
            else:
                row_of[index] = float(number)
        host = torch.tensor(row_of, dtype=torch.float64)
        if not is_apart:
            return host
        staged = self._device.pinned(host.shape, host.dtype)
        staged.copy_(host)
        flat = self._device.bring(staged, non_blocking=True)
        for start, run in _runs(on_device):
            flat[start : start + len(run)] = stacked(run)
        return flat

    def _own(self, says: Says) -> torch.Tensor:
        """Return the flags that those unite which train together, float64[flags] on the host."""
        row = [0.0] * (self._num_flags - self._num_common)
        for flag in says.flags:
            if flag >= self._num_common:
                row[flag - self._num_common] = 1.0
        return torch.tensor(row, dtype=torch.float64)

    def _host(self, says: Says, found: Found) -> torch.Tensor:
        """Return for all ranks how many rows are new, flags, and what is told: float64[n]."""
        row = [0.0] * (1 + self._num_common)
        row[0] = float(sum(each not in self._rows for each in found))
        for flag in says.flags:
            if flag < self._num_common:
                row[1 + flag] = 1.0
        return torch.tensor(row + self._slots.of(says.told), dtype=torch.float64)


class _Uniting:
    """Flags on their way to those that train together."""

    def __init__(self, flags: torch.Tensor, group: Gathering) -> None:
        self._flags, self._pending = flags, group.start_all_reduce(flags)

    def wait(self) -> torch.Tensor:
        """Return how many ranks set each."""
        self._pending.wait()
        return self._flags


def _united(ahead: list[Row], behind: list[Row]) -> list[Row]:
    return sorted({*ahead, *behind})


def _runs(numbers: Mapping[int, torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield numbers whose places follow one another, with the first place of each run."""
    places = sorted(numbers)
    for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        own = [place for _, place in run]
        yield own[0], [numbers[place].reshape(()) for place in own]
