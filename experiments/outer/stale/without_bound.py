"""Shards whose workers never wait: immediate updates, and gossip.

`AsynchronousShard`: a parameter server without a bound (Downpour SGD: Dean et al., NIPS 2012;
Hogwild: Niu et al., NIPS 2011). `GossipShard`: each worker has its own parameters and averages them
with those of one other worker (AD-PSGD: Lian et al., ICML 2018). All parameters are in one process,
so that both send as many messages as the server with a bound.
"""

import random
import threading
from collections.abc import Mapping, Sequence

from torch import Tensor

from experiments.outer.stale.shard import Values, sum_in_order


class AsynchronousShard:
    """Some parameters, by name, to which updates are added when they arrive.

    `most_ahead` is the largest lead of a reading worker over the slowest.
    """

    def __init__(self, values: Mapping[str, Tensor], num_workers: int) -> None:
        self._values = {name: value.clone() for name, value in values.items()}
        self._clocks = [0] * num_workers
        self._lock = threading.Lock()
        self.most_ahead = 0

    def read(self, worker: int, clock: int) -> Values:
        """Return the current parameters."""
        with self._lock:
            self.most_ahead = max(self.most_ahead, clock - min(self._clocks))
            return {name: value.clone() for name, value in self._values.items()}

    def add(self, worker: int, clock: int, update: Mapping[str, Tensor]) -> None:
        """Add an update immediately."""
        with self._lock:
            self._clocks[worker] += 1
            for name, value in self._values.items():
                value += update[name]

    def settled(self) -> tuple[int, Values]:
        """Return the received updates divided by the workers, and the parameters."""
        with self._lock:
            number = sum(self._clocks) // len(self._clocks)
            return number, {name: value.clone() for name, value in self._values.items()}


class GossipShard:
    """Parameters of each worker, by name; before an iteration, two workers take their mean.

    The other worker is random for the worker and its iteration, and the same on all shards. It may
    be computing meanwhile; its update is added to the mean. So the mean over workers moves by each
    update divided by `num_workers`.
    """

    def __init__(self, values: Mapping[str, Tensor], num_workers: int) -> None:
        self._own = [
            {name: value.clone() for name, value in values.items()} for _ in range(num_workers)
        ]
        self._clocks = [0] * num_workers
        self._lock = threading.Lock()
        self.most_ahead = 0

    def read(self, worker: int, clock: int) -> Values:
        """Average with another worker; return the mean."""
        with self._lock:
            self.most_ahead = max(self.most_ahead, clock - min(self._clocks))
            mine, others = self._own[worker], self._own[self.peer(worker, clock)]
            for name, value in mine.items():
                value.add_(others[name]).div_(2)
                others[name].copy_(value)
            return {name: value.clone() for name, value in mine.items()}

    def add(self, worker: int, clock: int, update: Mapping[str, Tensor]) -> None:
        """Add an update to the worker's current parameters."""
        with self._lock:
            self._clocks[worker] += 1
            for name, value in self._own[worker].items():
                value.add_(update[name], alpha=len(self._own))

    def peer(self, worker: int, clock: int) -> int:
        """Return the worker to average with before an iteration; itself if alone."""
        others = [each for each in range(len(self._own)) if each != worker]
        return random.Random(1_000_003 * clock + worker).choice(others) if others else worker

    def settled(self) -> tuple[int, Values]:
        """Return the received updates divided by the workers, and the mean of all parameters."""
        with self._lock:
            number = sum(self._clocks) // len(self._clocks)
            return number, {name: _mean([own[name] for own in self._own]) for name in self._own[0]}


def _mean(values: Sequence[Tensor]) -> Tensor:
    return sum_in_order(values) / len(values)
