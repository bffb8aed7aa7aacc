"""What a user asks of data parallelism, and how the micro-batches of a step are divided."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import accumulate, groupby
from math import gcd, lcm
from types import MappingProxyType
from typing import ClassVar, Final

from gpipe_hpc.errors import ConfigError

log = logging.getLogger("gpipe_hpc.pipeline")

_OF_LOCAL_SGD: Final = ("lr", "momentum", "nesterov", "parts", "behind", "mix")
_OF_COMPRESSOR: Final[Mapping[str, str]] = MappingProxyType(
    {"powersgd_rank": "powersgd", "topk_fraction": "topk", "qsgd_levels": "qsgd"}
)

# What a setting must be, by the type of its default.
_KINDS: Final[Mapping[type, tuple[str, type | tuple[type, ...]]]] = MappingProxyType(
    {bool: ("true or false", bool), int: ("a whole number", int), float: ("a number", (int, float))}
)


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Choose how the replicas of a stage combine their gradients.

    Each field is a setting of the group ``conf/outer`` of the same name.

    Args:
        bucket_bytes: Largest size of a gradient bucket. A larger parameter has a bucket of its own.
        overlap: Reduce a bucket during the stage's last backward, as soon as its last gradient is
            complete; otherwise after that backward.
        hierarchy: ``none``; ``host`` to sum within each host first and then between hosts; or a
            number of consecutive replicas that count as one host.
        order: ``backend``, or ``rank`` to sum in the order of ranks, which gives the same bits for
            any buckets.
        weights: One whole number per replica, in whose proportion micro-batches are divided over
            replicas of unequal speed. None divides evenly.
        compress: What replicas send instead of their gradients, see `CHOICES`. The
            compression error is added to the gradients of the next step.
        powersgd_rank: Columns of the two factors that represent a matrix.
        topk_fraction: Fraction of the numbers of a bucket that is sent.
        qsgd_levels: Number of levels on each side of 0 to which a number is rounded.
        every: If above 0, each replica trains on its own gradients (local SGD), and every so many
            steps an outer SGD steps on the mean change of the parameters since the last outer step.
        lr: Learning rate of the outer SGD.
        momentum: Momentum of the outer SGD.
        nesterov: Use Nesterov's momentum in the outer SGD.
        parts: Number of parts into which the buckets are dealt. Parts are averaged in turn, each
            every `every` steps (streaming DiLoCo).
        behind: Steps after which the average of a part arrives, while training goes on.
        mix: Share of a replica's own parameters that is kept when a late average arrives.
        shard: How the state of the optimizer is divided. ``none``: each replica has all of it.
            ``flat``: each has an equal part of every bucket; gradients are reduced to the owner of
            a part, and parameters are gathered from there. ``oss``: each has whole tensors, as
            fairscale's OSS divides them.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "hierarchy": ("none", "host"),
            "order": ("backend", "rank"),
            "compress": ("none", "bfloat16", "float16", "powersgd", "topk", "qsgd"),
            "shard": ("none", "flat", "oss"),
        }
    )

    bucket_bytes: float = 25e6
    overlap: bool = True
    hierarchy: str | int = "none"
    order: str = "backend"
    compress: str = "none"
    powersgd_rank: int = 2
    topk_fraction: float = 0.01
    qsgd_levels: int = 7
    every: int = 0
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    parts: int = 1
    behind: int = 0
    mix: float = 0.5
    weights: Sequence[int] | None = None
    shard: str = "none"

    @classmethod
    def of(cls, settings: object) -> "Outer":
        """Return the choices that an object has as attributes of the same names."""
        given = vars(settings)
        return cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given})

    @property
    def uses_local_sgd(self) -> bool:
        """Return whether replicas train on their own gradients between outer steps."""
        return self.every > 0

    @property
    def num_residuals(self) -> int:
        """Return how many compression errors are kept for each element of a parameter."""
        return int(self.compress != "none")

    @property
    def num_local_sgd(self) -> float:
        """Return how many numbers local SGD keeps for each element of a parameter.

        They are the anchor, the momentum, and the average that is on its way. Parts take turns, so
        only one part has an average on its way.
        """
        if not self.uses_local_sgd:
            return 0
        return 1 + (self.momentum > 0) + (1 / self.parts if self.behind else 0)

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot work, alone or together."""
        self._check_kinds()
        if not 0 < self.bucket_bytes < math.inf:
            raise ConfigError(
                f"outer.bucket_bytes: expected bytes above 0, got {self.bucket_bytes}; write it as "
                "25MB"
            )
        _check_name("order", self.order)
        _check_name("compress", self.compress)
        if not isinstance(self.hierarchy, int):
            _check_name("hierarchy", self.hierarchy, "or a number of copies")
        elif isinstance(self.hierarchy, bool) or self.hierarchy < 1:
            raise ConfigError(
                f"outer.hierarchy: expected none, host or a number of copies, got "
                f"{self.hierarchy}; give one of these"
            )
        _check_name("shard", self.shard)
        chosen = [
            f"outer.{name}={value}"
            for name, value in (
                ("hierarchy", self.hierarchy),
                ("order", self.order),
                ("compress", self.compress),
            )
            if value not in ("none", "backend")
        ]
        if len(chosen) > 1:
            raise ConfigError(
                f"outer: expected one way to sum, got {' and '.join(chosen)}; keep one of them"
            )
        if self.weights is not None:
            object.__setattr__(self, "weights", _checked_weights(self.weights))
        self._check_shard(chosen)
        self._check_local_sgd()

    def _check_shard(self, chosen: Sequence[str]) -> None:
        """Raise ConfigError for what a sharded optimizer excludes; `chosen`: ways to sum."""
        if self.shard == "flat" and chosen and self.order != "rank":
            raise ConfigError(
                f"outer.shard=flat: each replica gets its part of the sum alone, which works with "
                f"outer.order only, expected no other way to sum, got {chosen[0]}; remove it, or "
                f"use outer.shard=oss"
            )
        if self.shard != "none" and self.uses_local_sgd:
            raise ConfigError(
                f"outer.shard: replicas that train apart (outer.every={self.every}) each need all "
                f"of the optimizer's state, expected none, got {self.shard}; remove outer.shard, "
                f"or use outer=allreduce"
            )

    def check_copies(self, num_copies: int) -> None:
        """Raise ConfigError for a hierarchy that does not divide the replicas of a stage."""
        if isinstance(self.hierarchy, int) and num_copies % self.hierarchy:
            fitting = [n for n in range(1, num_copies + 1) if num_copies % n == 0]
            raise ConfigError(
                f"outer.hierarchy: expected a divisor of the {num_copies} copies of a stage, got "
                f"{self.hierarchy}; choose one of {', '.join(map(str, fitting))}, or host"
            )

    def _check_kinds(self) -> None:
        """Raise ConfigError for a value of another type than its default."""
        for each in fields(self):
            what, fits = _KINDS.get(type(each.default), ("", object))
            got = getattr(self, each.name)
            is_bool = isinstance(got, bool)
            if what and (not isinstance(got, fits) or is_bool is not (fits is bool)):
                raise ConfigError(
                    f"outer.{each.name}: expected {what}, got {got!r}; the default is "
                    f"{each.default}"
                )

    def _is_set(self, name: str) -> bool:
        """Return whether a setting differs from its default."""
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

    def unused(self) -> list[str]:
        """Return a message for each setting that was given and has no effect."""
        found = [
            f"outer.{name} is for outer.compress={compress}, which is {self.compress}"
            for name, compress in _OF_COMPRESSOR.items()
            if self._is_set(name) and self.compress != compress
        ]
        if self._is_set("mix") and not self.behind:
            found.append("outer.mix is for averages that arrive later, and outer.behind is 0")
        return found

    def _check_local_sgd(self) -> None:
        """Raise ConfigError for settings of local SGD that cannot work."""
        if self.every < 0:
            raise ConfigError(
                f"outer.every: expected steps from one outer step to the next, or 0 for sums of "
                f"gradients in each step, got {self.every}; correct outer.every"
            )
        if not self.every:
            for name in _OF_LOCAL_SGD:
                if self._is_set(name):
                    raise ConfigError(
                        f"outer.{name}: is for replicas that train apart, expected every of 1 or "
                        f"more, got 0; add every=64"
                    )
            return
        if not (0 < self.lr < math.inf and 0 <= self.momentum < 1 and 0 <= self.mix < 1):
            raise ConfigError(
                f"outer: expected lr above 0, momentum and mix from 0 to below 1, got "
                f"lr={self.lr}, momentum={self.momentum}, mix={self.mix}; correct outer.lr, "
                f"outer.momentum or outer.mix"
            )
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "outer.nesterov: expected a momentum above 0, got 0; set momentum=0.9"
            )
        if not 1 <= self.parts <= self.every:
            raise ConfigError(
                f"outer.parts: expected 1 to outer.every={self.every}, as each part is averaged in "
                f"another step, got {self.parts}; correct outer.parts or outer.every"
            )
        if not 0 <= self.behind < self.every:
            raise ConfigError(
                f"outer.behind: expected 0 to {self.every - 1}, so that a part has arrived before "
                f"it leaves again after outer.every={self.every} steps, got {self.behind}; correct "
                f"outer.behind or outer.every"
            )


def _check_name(setting: str, value: str, more: str = "") -> None:
    known = Outer.CHOICES[setting]
    if value not in known:
        raise ConfigError(
            f"outer.{setting}: expected {' '.join([', '.join(known), more]).strip()}, got "
            f"{value!r}; name one of them"
        )


def _checked_weights(weights: Sequence[int]) -> tuple[int, ...]:
    """Return the weights of replicas; raise ConfigError unless they are whole numbers above 0."""
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str)
    if is_list and weights and all(type(each) is int and each > 0 for each in weights):
        return tuple(weights)
    got = list(weights) if is_list else weights
    raise ConfigError(
        f"outer.weights: expected a whole number above 0 for each replica, got {got}; write "
        f"[3,1] if the first of two takes three micro-batches while the second takes one"
    )


@dataclass(frozen=True)
class MicrobatchSplit:
    """How many consecutive micro-batches of the global batch each replica runs.

    Args:
        runs: Pairs (number of consecutive replicas, micro-batches of each): few numbers, also for
            thousands of replicas.
    """

    runs: tuple[tuple[int, int], ...] = ((1, 1),)

    @classmethod
    def of_counts(cls, counts: Iterable[int]) -> "MicrobatchSplit":
        """Return the split with these micro-batches of each replica."""
        return cls(tuple((len(list(equal)), count) for count, equal in groupby(counts)))

    @classmethod
    def divide(
        cls, microbatches: int, replicas: int, weights: Sequence[int] | None
    ) -> "MicrobatchSplit":
        """Divide replicas x `microbatches` in the proportion of the weights; None divides evenly.

        Raises ConfigError unless there is one weight per replica and the division is exact.
        """
        if weights is None:
            return cls(((replicas, microbatches),))
        weights = _checked_weights(weights)
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
        """Return the largest number of micro-batches of a replica."""
        return max(count for _, count in self.runs)

    @property
    def fullest(self) -> int:
        """Return the first replica with the largest number of micro-batches."""
        return self.counts.index(self.most)

    @property
    def are_equal(self) -> bool:
        """Return whether all replicas run equally many."""
        return len({count for _, count in self.runs}) == 1

    def of(self, replica: int) -> range:
        """Return the global micro-batches of a replica."""
        first = skipped = 0
        for number, count in self.runs:
            if replica < skipped + number:
                first += (replica - skipped) * count
                return range(first, first + count)
            first, skipped = first + number * count, skipped + number
        raise IndexError(f"expected one of {skipped} replicas, got {replica}")

    def owner(self, microbatch: int) -> tuple[int, int]:
        """Return the replica that runs a global micro-batch, and its index within that replica."""
        ends = list(accumulate(self.counts))
        replica = next(number for number, end in enumerate(ends) if microbatch < end)
        return replica, microbatch - self.of(replica).start


def log_inexact(outer: Outer) -> None:
    """Log which choices make a run differ from one process; log nothing for exact ones."""
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
