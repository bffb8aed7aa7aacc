"""One shard of a parameter server whose workers may be a bounded number of iterations apart.

Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server" (NIPS
2013). Before iteration c, counted from 0, a worker reads all parameters; after it, it adds one
update. With bound s it

- waits until every worker has added its updates of the iterations before c - s, and sees all of
  them: the fastest worker is at most s iterations ahead of the slowest,
- sees its own updates before c,
- sees the updates of others that have arrived, only of iterations below c + s.

With s = 0 the last rule adds nothing: the worker sees exactly the iterations before c, which is the
synchronous step.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

Values = dict[str, Tensor]


class ParameterShard(Protocol):
    """The interface of a shard for workers, in this process or another one."""

    def read(self, worker: int, clock: int) -> Values:
        """Return the parameters for iteration `clock` of a worker, after the bound's wait."""

    def add(self, worker: int, clock: int, update: Mapping[str, Tensor]) -> None:
        """Add the update of iteration `clock` of a worker."""


class Shard:
    """Some parameters, by name, in the memory of this process; thread-safe.

    Updates are added in the order of iterations and, within one, of workers, so the parameters
    after finished iterations do not depend on the order of arrival, to the last bit. `limit_s` is
    the longest wait of a worker before TimeoutError.
    """

    def __init__(
        self, values: Mapping[str, Tensor], num_workers: int, bound: int, limit_s: float = 60.0
    ) -> None:
        assert bound >= 0, f"shard: expected a bound of 0 or more, got {bound}"
        self._settled = {name: value.clone() for name, value in values.items()}
        self._pending: dict[int, dict[int, Mapping[str, Tensor]]] = {}
        self._clocks = [0] * num_workers  # iterations of each worker whose update has arrived
        self._reading = [-1] * num_workers  # the iteration that each worker reads for or computes
        self._bound, self._limit_s = bound, limit_s
        self._num_settled = 0
        self._changed = threading.Condition()
        self.most_ahead = 0  # largest lead of a reading worker over the slowest

    def read(self, worker: int, clock: int) -> Values:
        """Return the parameters for iteration `clock` of a worker, after the bound's wait."""
        with self._changed:
            assert clock == self._clocks[worker], (
                f"shard: worker {worker} reads for iteration {clock} after {self._clocks[worker]}"
            )
            if not self._changed.wait_for(lambda: self._may_begin(clock), self._limit_s):
                slow = [w for w, done in enumerate(self._clocks) if done < clock - self._bound]
                raise TimeoutError(
                    f"shard: worker {worker} waits to begin iteration {clock} with bound "
                    f"{self._bound}, expected all to have finished {clock - self._bound}, got "
                    f"nothing from workers {slow} in {self._limit_s:g} s; see what they do"
                )
            self._reading[worker] = clock
            self.most_ahead = max(self.most_ahead, self._check_ahead(worker))
            return self._seen_in(clock)

    def add(self, worker: int, clock: int, update: Mapping[str, Tensor]) -> None:
        """Add the update of iteration `clock` of a worker."""
        with self._changed:
            assert clock == self._reading[worker] == self._clocks[worker], (
                f"shard: worker {worker} adds to iteration {clock}, having read for "
                f"{self._reading[worker]} and finished {self._clocks[worker]}"
            )
            self._check_ahead(worker)
            self._pending.setdefault(clock, {})[worker] = update
            self._clocks[worker] += 1
            self._settle()
            self._changed.notify_all()

    def settled(self) -> tuple[int, Values]:
        """Return the number of iterations that all workers have finished, and the parameters."""
        with self._changed:
            return self._num_settled, {n: value.clone() for n, value in self._settled.items()}

    def _may_begin(self, clock: int) -> bool:
        return min(self._clocks) >= clock - self._bound

    def _check_ahead(self, worker: int) -> int:
        """Return the lead of a worker over the slowest; assert that it is within the bound."""
        ahead = self._reading[worker] - min(self._clocks)
        assert ahead <= self._bound, (
            f"shard: worker {worker} is {ahead} iterations ahead, expected at most {self._bound}"
        )
        return ahead

    def _settle(self) -> None:
        """Add the updates of iterations that all workers have finished to the parameters."""
        while self._num_settled < min(self._clocks):
            _add_iteration(self._settled, self._pending.pop(self._num_settled))
            self._num_settled += 1

    def _seen_in(self, clock: int) -> Values:
        seen = {name: value.clone() for name, value in self._settled.items()}
        for each in sorted(self._pending):
            if each < clock + self._bound:
                _add_iteration(seen, self._pending[each])
        return seen


def _add_iteration(values: Values, updates: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Add the sum of an iteration's updates, in the order of workers."""
    for name, value in values.items():
        value += sum_in_order([updates[worker][name] for worker in sorted(updates)])


def sum_in_order(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of the terms, added from left to right."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def divided(values: Mapping[str, Tensor], num_shards: int) -> Iterator[Values]:
    """Yield the parameters of each shard: the largest first, each to the smallest shard so far."""
    shards: list[Values] = [{} for _ in range(num_shards)]
    sizes = [0] * num_shards
    for name in sorted(values, key=lambda name: (-values[name].numel(), name)):
        emptiest = sizes.index(min(sizes))
        shards[emptiest][name] = values[name]
        sizes[emptiest] += values[name].numel()
    yield from shards
