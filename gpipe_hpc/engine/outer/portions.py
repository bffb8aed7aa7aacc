"""How many of the global micro-batches each replica runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby
from math import gcd, lcm

from gpipe_hpc.errors import ConfigError


@dataclass(frozen=True)
class Portions:
    """How many micro-batches each replica has; they are consecutive ones of the global batch.

    `runs`: of replicas that follow one another, how many have how many each. So all ranks are told
    few numbers of thousands of replicas.
    """

    runs: tuple[tuple[int, int], ...] = ((1, 1),)

    @classmethod
    def of_counts(cls, counts: Iterable[int]) -> "Portions":
        """Return those of the micro-batches of each replica."""
        return cls(tuple((len(list(equal)), count) for count, equal in groupby(counts)))

    @classmethod
    def divide(cls, microbatches: int, replicas: int, weights: Sequence[int] | None) -> "Portions":
        """Divide replicas x `microbatches` as the weights say; None: evenly.

        Raises ConfigError where there is no weight for each replica, or they do not divide.
        """
        if weights is None:
            return cls(((replicas, microbatches),))
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
        return cls.of_counts(total // whole * part for part in parts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the micro-batches of each replica."""
        return tuple(count for number, count in self.runs for _ in range(number))

    @property
    def num_replicas(self) -> int:
        """Return the number of replicas."""
        return sum(number for number, _ in self.runs)

    @property
    def total(self) -> int:
        """Return the number of global micro-batches."""
        return sum(number * count for number, count in self.runs)

    @property
    def most(self) -> int:
        """Return the micro-batches of the replica that has most."""
        return max(count for _, count in self.runs)

    @property
    def fullest(self) -> int:
        """Return the first replica that has so many."""
        return self.counts.index(self.most)

    @property
    def are_equal(self) -> bool:
        """Say whether all replicas have as many."""
        return len({count for _, count in self.runs}) == 1

    def of(self, replica: int) -> range:
        """Return the global micro-batches of a replica."""
        first = ahead = 0
        for number, count in self.runs:
            if replica < ahead + number:
                first += (replica - ahead) * count
                return range(first, first + count)
            first, ahead = first + number * count, ahead + number
        raise IndexError(f"expected one of {ahead} replicas, got {replica}")

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
