"""What a user asks of the outer data parallelism."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from gpipe_hpc.engine.outer.portions import checked_weights
from gpipe_hpc.errors import ConfigError

HIERARCHIES: Final = ("none", "host")
ORDERS: Final = ("backend", "rank")
COMPRESSORS: Final = ("none", "bfloat16", "float16", "powersgd", "topk", "qsgd")
SHARDS: Final = ("none", "flat", "oss")

_OF_APART: Final = ("lr", "momentum", "nesterov", "parts", "behind", "mix")
_OF_COMPRESSOR: Final[Mapping[str, str]] = MappingProxyType(
    {"powersgd_rank": "powersgd", "topk_fraction": "topk", "qsgd_levels": "qsgd"}
)

# What a setting must be, by the type of its default.
_KINDS: Final[Mapping[type, tuple[str, type | tuple[type, ...]]]] = MappingProxyType(
    {bool: ("true or false", bool), int: ("a whole number", int), float: ("a number", (int, float))}
)


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How the copies of a stage, over the replicas, combine their gradients.

    Each field is a setting of the group ``conf/outer`` of the same name.

    `bucket_bytes`: the gradients of a stage are summed in buckets of at most so many bytes; a
    parameter that is larger has one of its own. `overlap`: a bucket may leave within the stage's
    last backward, as soon as its last gradient has come; otherwise behind it. `hierarchy`:
    ``none``, or sum inside each ``host`` first and then between hosts, or with a number of copies
    that counts as one host. `order`: ``backend``, or ``rank`` for sums in the order of ranks: the
    same bits for any buckets. `weights`: how the micro-batches of a step are divided over replicas
    of unequal speed, a whole number for each; None: evenly.

    `compress`: of `COMPRESSORS`, what copies send in place of their gradients; what it loses is
    added to the next step's. `powersgd_rank`: columns of a matrix's factors. `topk_fraction`: of a
    bucket's numbers, those that are sent. `qsgd_levels`: to how many levels a number is rounded, on
    each side of 0.

    `every`: above 0, replicas train apart, each on its own gradients, and every so many steps an
    outer optimizer steps on how far the parameters have gone since, averaged over the replicas: SGD
    of rate `lr`, with `momentum`, which may be `nesterov`'s. `parts`: the model's buckets are dealt
    out into so many parts, averaged in turn, each every `every` steps. `behind`: the average of a
    part arrives that many steps after it has left, while training goes on; then a parameter becomes
    `mix` times what its replica has, plus the rest of what the outer optimizer made.

    `shard`: how the optimizer's state is divided over the copies. ``none``: each has all of it.
    ``flat``: each has an equal part of every bucket; gradients are summed to the part's owner alone
    and parameters gathered from there. ``oss``: each has whole tensors, divided by fairscale's OSS.
    """

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

    @property
    def is_apart(self) -> bool:
        """Say whether replicas train apart between outer steps."""
        return self.every > 0

    @property
    def num_residuals(self) -> int:
        """Return how many numbers of each parameter a copy keeps as what compression left out."""
        return int(self.compress != "none")

    @property
    def num_apart(self) -> float:
        """Return how many numbers of each parameter a replica keeps that trains apart from others.

        They are the anchor, the momentum, and the average that is under way beside the next steps.
        Parameters take turns in `parts`, so the average is of a part of them.
        """
        if not self.is_apart:
            return 0
        return 1 + (self.momentum > 0) + (1 / self.parts if self.behind else 0)

    def __post_init__(self) -> None:
        """Refuse what cannot be; raises ConfigError."""
        self._check_kinds()
        if not 0 < self.bucket_bytes < math.inf:
            raise ConfigError(
                f"outer.bucket_bytes: expected bytes above 0, got {self.bucket_bytes}; write it as "
                "25MB"
            )
        _check_name("order", self.order, ORDERS)
        _check_name("compress", self.compress, COMPRESSORS)
        if not isinstance(self.hierarchy, int):
            _check_name("hierarchy", self.hierarchy, HIERARCHIES, "or a number of copies")
        elif isinstance(self.hierarchy, bool) or self.hierarchy < 1:
            raise ConfigError(
                f"outer.hierarchy: expected none, host or a number of copies, got "
                f"{self.hierarchy}; give one of these"
            )
        _check_name("shard", self.shard, SHARDS)
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
                f"outer: expected one way to sum, got {' and '.join(chosen)}; leave all but one out"
            )
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_weights(self.weights))
        self._check_shard(chosen)
        self._check_apart()

    def _check_shard(self, chosen: Sequence[str]) -> None:
        """Refuse what does not go with a divided optimizer; `chosen`: other ways to sum."""
        if self.shard == "flat" and chosen and self.order != "rank":
            raise ConfigError(
                f"outer.shard=flat: leaves each copy its part of the sum and goes with outer.order "
                f"alone, expected no other way to sum, got {chosen[0]}; leave that out, or use "
                f"outer.shard=oss"
            )
        if self.shard != "none" and self.is_apart:
            raise ConfigError(
                f"outer.shard: replicas that train apart (outer.every={self.every}) each need all "
                f"of the optimizer's state, expected none, got {self.shard}; leave it out, or use "
                f"outer=allreduce"
            )

    def check_copies(self, num_copies: int) -> None:
        """Refuse a hierarchy that does not fit the copies of a stage; raises ConfigError."""
        if isinstance(self.hierarchy, int) and num_copies % self.hierarchy:
            fitting = [n for n in range(1, num_copies + 1) if num_copies % n == 0]
            raise ConfigError(
                f"outer.hierarchy: expected a divisor of the {num_copies} copies of a stage, got "
                f"{self.hierarchy}; choose one of {', '.join(map(str, fitting))}, or host"
            )

    def _check_kinds(self) -> None:
        """Refuse a value that is no number, no whole one, or neither true nor false."""
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
        """Say whether a setting is other than it is by default."""
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

    def unused(self) -> list[str]:
        """Return the settings that were given and have no effect, each with what it is for."""
        found = [
            f"outer.{name} is for outer.compress={compress}, which is {self.compress}"
            for name, compress in _OF_COMPRESSOR.items()
            if self._is_set(name) and self.compress != compress
        ]
        if self._is_set("mix") and not self.behind:
            found.append("outer.mix is for averages that arrive later, and outer.behind is 0")
        return found

    def _check_apart(self) -> None:
        """Refuse an outer step that cannot be."""
        if self.every < 0:
            raise ConfigError(
                f"outer.every: expected steps from one outer step to the next, or 0 for sums of "
                f"gradients in each step, got {self.every}; correct outer.every"
            )
        if not self.every:
            for name in _OF_APART:
                if self._is_set(name):
                    raise ConfigError(
                        f"outer.{name}: is for replicas that train apart, expected every of 1 or "
                        f"more beside it, got 0; add every=64"
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
                f"outer.parts: expected 1 to outer.every={self.every}, as each part has a step of "
                f"its own, got {self.parts}; correct outer.parts or outer.every"
            )
        if not 0 <= self.behind < self.every:
            raise ConfigError(
                f"outer.behind: expected 0 to {self.every - 1}, so that a part has arrived before "
                f"it leaves again after outer.every={self.every} steps, got {self.behind}; correct "
                f"outer.behind or outer.every"
            )


def _check_name(setting: str, value: str, known: Sequence[str], more: str = "") -> None:
    if value not in known:
        raise ConfigError(
            f"outer.{setting}: expected {' '.join([', '.join(known), more]).strip()}, got "
            f"{value!r}; name one of them"
        )
