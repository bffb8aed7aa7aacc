"""What a user asks of the outer data parallelism."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpipe_hpc.engine.outer.portions import checked_weights
from gpipe_hpc.errors import ConfigError

HIERARCHIES: Final = ("none", "host")
ORDERS: Final = ("backend", "rank")
ALGORITHMS: Final = (
    "backend",
    "auto",
    "ring",
    "recursive_doubling",
    "rabenseifner",
    "tree",
    "chain",
)
COMPRESSORS: Final = ("none", "bfloat16", "float16", "powersgd", "topk", "qsgd")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How the copies of a stage, over the replicas, combine their gradients.

    Each field is a setting of the group ``conf/outer`` of the same name.

    `bucket_bytes`: the gradients of a stage are summed in buckets of at most so many bytes; a
    parameter that is larger has one of its own. `overlap`: a bucket may leave within the stage's
    last backward, as soon as its last gradient has come; otherwise behind it. `hierarchy`:
    ``none``, or sum inside each ``host`` first and then between hosts, or with a number of copies
    that counts as one host. `order`: ``backend``, or ``rank`` for sums in the order of ranks: the
    same bits for any buckets. `algorithm`: of ``ALGORITHMS``; ``backend`` is Gloo's or NCCL's own,
    ``auto`` measures the link at the start and chooses by size. `weights`: how
    the micro-batches of a step are divided over replicas of unequal speed, a whole number for each;
    None: evenly.

    `compress`: of `COMPRESSORS`, what copies send in place of their gradients; what it loses is
    added to the next step's. `powersgd_rank`: columns of a matrix's factors. `topk_fraction`: of a
    bucket's numbers, those that are sent. `qsgd_levels`: to how many levels a number is rounded, on
    each side of 0.
    """

    bucket_bytes: float = 25e6
    overlap: bool = True
    hierarchy: str | int = "none"
    order: str = "backend"
    algorithm: str = "backend"
    compress: str = "none"
    powersgd_rank: int = 2
    topk_fraction: float = 0.01
    qsgd_levels: int = 7
    weights: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be; raises ConfigError."""
        if not 0 < self.bucket_bytes < math.inf:
            raise ConfigError(
                f"outer.bucket_bytes: expected bytes above 0, got {self.bucket_bytes}; write it as "
                "25MB"
            )
        _check_name("order", self.order, ORDERS)
        _check_name("algorithm", self.algorithm, ALGORITHMS)
        _check_name("compress", self.compress, COMPRESSORS)
        if not isinstance(self.hierarchy, int):
            _check_name("hierarchy", self.hierarchy, HIERARCHIES, "or a number of copies")
        elif isinstance(self.hierarchy, bool) or self.hierarchy < 1:
            raise ConfigError(
                f"outer.hierarchy: expected none, host or a number of copies, got {self.hierarchy}"
            )
        chosen = [
            f"outer.{name}={value}"
            for name, value in (
                ("hierarchy", self.hierarchy),
                ("order", self.order),
                ("algorithm", self.algorithm),
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


def _check_name(setting: str, value: str, known: Sequence[str], more: str = "") -> None:
    if value not in known:
        raise ConfigError(
            f"outer.{setting}: expected {' '.join([', '.join(known), more]).strip()}, got "
            f"{value!r}; name one of them"
        )
