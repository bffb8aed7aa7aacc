"""Division of the micro-batches of a step over replicas, and a log message about inexact
settings."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby
from math import gcd, lcm

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import Outer

log = logging.getLogger("gpipe_hpc.pipeline")


@dataclass(frozen=True)
class MicrobatchSplit:
    """How many consecutive micro-batches of the global batch each replica runs.

    Args:
        runs: Pairs (number of consecutive replicas, micro-batches of each), which are few even for
            thousands of replicas.
    """

    runs: tuple[tuple[int, int], ...] = ((1, 1),)

    @classmethod
    def of_counts(cls, counts: Iterable[int]) -> "MicrobatchSplit":
        """Return the split with this number of micro-batches for each replica."""
        return cls(tuple((len(list(equal)), count) for count, equal in groupby(counts)))

    @classmethod
    def divide(
        cls, microbatches: int, replicas: int, weights: Sequence[int] | None
    ) -> "MicrobatchSplit":
        """Divide replicas x `microbatches` in proportion to the weights; None divides evenly.

        Raises ConfigError unless there is one weight per replica and the division is exact.
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
        """Return the number of micro-batches of each replica."""
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
        """Return the largest number of micro-batches of a replica."""
        return max(count for _, count in self.runs)

    @property
    def fullest(self) -> int:
        """Return the first replica with the largest number of micro-batches."""
        return self.counts.index(self.most)

    @property
    def are_equal(self) -> bool:
        """Return whether all replicas run the same number of micro-batches."""
        return len({count for _, count in self.runs}) == 1

    def of(self, replica: int) -> range:
        """Return the indices of a replica's micro-batches in the global batch."""
        first = skipped = 0
        for number, count in self.runs:
            if replica < skipped + number:
                first += (replica - skipped) * count
                return range(first, first + count)
            first, skipped = first + number * count, skipped + number
        raise IndexError(f"expected one of {skipped} replicas, got {replica}")

    def owner(self, microbatch: int) -> tuple[int, int]:
        """Return the replica that runs a global micro-batch, and the index within that replica."""
        ends = list(accumulate(self.counts))
        replica = next(number for number, end in enumerate(ends) if microbatch < end)
        return replica, microbatch - self.of(replica).start


def log_inexact(outer: Outer) -> None:
    """Log which settings make results differ from those of one process, if there are any."""
    if not outer.uses_local_sgd:
        if outer.compress != "none":
            log.info(
                "outer.compress=%s: not exact. Replicas send compressed gradients and add the "
                "compression error to the next step's gradients; tied parameters are summed "
                "uncompressed. outer.compress=none is exact",
                outer.compress,
            )
        return
    parts = f", in {outer.parts} parts in turn" if outer.parts > 1 else ""
    behind = f", arriving {outer.behind} steps later" if outer.behind else ""
    log.info(
        "outer.every=%d: not exact. Replicas train by themselves; every %d steps their parameters "
        "are averaged%s%s, and an outer SGD of rate %g with momentum %g steps on their mean "
        "change%s. outer=allreduce is exact",
        outer.every,
        outer.every,
        parts,
        behind,
        outer.lr,
        outer.momentum,
        "" if outer.compress == "none" else f", sent as {outer.compress}",
    )
