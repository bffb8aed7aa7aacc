"""Shards whose workers never wait: updates that count at once, and gossip.

`AsynchronousShard`: a parameter server without a bound (Downpour SGD: Dean et al., NIPS 2012;
Hogwild: Niu et al., NIPS 2011). `GossipShard`: no common parameters; each worker has its own and
averages them with one other's at a time (AD-PSGD: Lian et al., ICML 2018). Its copies live in one
process here, as those of the server do, so that all ways take the same messages.
"""

import random
import threading
from collections.abc import Mapping, Sequence

from torch import Tensor

from experiments.outer.stale.shard import Values, sum_in_order


class AsynchronousShard:
    """Some parameters, by name; an update is added when it comes, whatever the others do.

    `most_ahead`: of any worker that read, iterations over the slowest at that moment.
    """

    def __init__(self, values: Mapping[str, Tensor], num_workers: int) -> None:
        self._values = {name: value.clone() for name, value in values.items()}
        self._clocks = [0] * num_workers
        self._lock = threading.Lock()
        self.most_ahead = 0

    def read(self, worker: int, clock: int) -> Values:
        """Return the parameters as they are."""
        with self._lock:
            self.most_ahead = max(self.most_ahead, clock - min(self._clocks))
            return {name: value.clone() for name, value in self._values.items()}

    def add(self, worker: int, clock: int, update: Mapping[str, Tensor]) -> None:
        """Add an update at once."""
        with self._lock:
            self._clocks[worker] += 1
            for name, value in self._values.items():
                value += update[name]

    def settled(self) -> tuple[int, Values]:
        """Return the updates that have come, over the workers, and the parameters."""
        with self._lock:
            number = sum(self._clocks) // len(self._clocks)
            return number, {name: value.clone() for name, value in self._values.items()}


class GossipShard:
    """Parameters of each worker, by name; before an iteration two workers' become their mean.

    The other is drawn for the worker and its iteration, the same one on all shards. It may be
    computing meanwhile; its update is added to the mean. So the mean of all workers moves by each
    update as a parameter server's would: updates of `num_workers` times the size, a share each.
    """

    def __init__(self, values: Mapping[str, Tensor], num_workers: int) -> None:
        self._own = [
            {name: value.clone() for name, value in values.items()} for _ in range(num_workers)
        ]
        self._clocks = [0] * num_workers
        self._lock = threading.Lock()
        self.most_ahead = 0

    def read(self, worker: int, clock: int) -> Values:
        """Average with another worker; return the parameters that both have then."""
        with self._lock:
            self.most_ahead = max(self.most_ahead, clock - min(self._clocks))
            mine, others = self._own[worker], self._own[self.peer(worker, clock)]
            for name, value in mine.items():
                value.add_(others[name]).div_(2)
                others[name].copy_(value)
            return {name: value.clone() for name, value in mine.items()}

    def add(self, worker: int, clock: int, update: Mapping[str, Tensor]) -> None:
        """Add an update to the worker's own parameters, as they are by now."""
        with self._lock:
            self._clocks[worker] += 1
            for name, value in self._own[worker].items():
                value.add_(update[name], alpha=len(self._own))

    def peer(self, worker: int, clock: int) -> int:
        """Return who a worker averages with ahead of an iteration: another, or itself if alone."""
        others = [each for each in range(len(self._own)) if each != worker]
        return random.Random(1_000_003 * clock + worker).choice(others) if others else worker

    def settled(self) -> tuple[int, Values]:
        """Return the updates that have come, over the workers, and the mean of all parameters."""
        with self._lock:
            number = sum(self._clocks) // len(self._clocks)
            return number, {name: _mean([own[name] for own in self._own]) for name in self._own[0]}


def _mean(values: Sequence[Tensor]) -> Tensor:
    return sum_in_order(values) / len(values)
