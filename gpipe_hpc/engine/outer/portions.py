"""How many of the global micro-batches each replica runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from math import gcd, lcm

from gpipe_hpc.errors import ConfigError


@dataclass(frozen=True)
class Portions:
    """How many micro-batches each replica has; they are consecutive ones of the global batch."""

    counts: tuple[int, ...] = (1,)

    @classmethod
    def divide(cls, microbatches: int, replicas: int, weights: Sequence[int] | None) -> "Portions":
        """Divide replicas x `microbatches` as the weights say; None: evenly.

        Raises ConfigError where there is no weight for each replica, or they do not divide.
        """
        if weights is None:
            return cls((microbatches,) * replicas)
        if len(weights) != replicas:
            raise ConfigError(
                f"outer.weights: expected a weight for each of {replicas} replica(s), got "
                f"{len(weights)}: {list(weights)}; write {replicas} numbers, or leave it out "
                f"for equal shares"
            )
        least = reduce(gcd, weights)
        parts = [weight // least for weight in weights]
        total, whole = microbatches * replicas, sum(parts)
        if total % whole:
            step = lcm(whole, replicas) // replicas
            below = microbatches // step * step
            near = " or ".join(str(number) for number in (below, below + step) if number)
            raise ConfigError(
                f"outer.weights: expected replicas x micro-batches that {list(weights)} divide, "
                f"multiples of {whole}, got {replicas} x {microbatches} = {total}; use {near} "
                f"micro-batches (pipeline.microbatches x train.accumulation), or other weights"
            )
        return cls(tuple(total // whole * part for part in parts))

    @property
    def total(self) -> int:
        """Return the number of global micro-batches."""
        return sum(self.counts)

    @property
    def most(self) -> int:
        """Return the micro-batches of the replica that has most."""
        return max(self.counts)

    @property
    def fullest(self) -> int:
        """Return the first replica that has so many."""
        return self.counts.index(self.most)

    @property
    def are_equal(self) -> bool:
        """Say whether all replicas have as many."""
        return len(set(self.counts)) == 1

    def of(self, replica: int) -> range:
        """Return the global micro-batches of a replica."""
        first = sum(self.counts[:replica])
        return range(first, first + self.counts[replica])

    def owner(self, microbatch: int) -> tuple[int, int]:
        """Return which replica has a global micro-batch, and which of its own that is."""
        ends = list(accumulate(self.counts))
        replica = next(number for number, end in enumerate(ends) if microbatch < end)
        return replica, microbatch - self.of(replica).start


def checked_weights(weights: Sequence[int]) -> tuple[int, ...]:
    """Return the weights of replicas; ConfigError if they are none."""
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str)
    if is_list and weights and all(type(each) is int and each > 0 for each in weights):
        return tuple(weights)
    got = list(weights) if is_list else weights
    raise ConfigError(
        f"outer.weights: expected a whole number above 0 for each replica, got {got}; write "
        f"[3,1] where the first of two takes three micro-batches while the second takes one"
    )
