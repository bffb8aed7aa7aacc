"""What a user asks of the outer data parallelism."""

import math
from dataclasses import dataclass
from typing import Final

from gpipe_hpc.errors import ConfigError

COMPRESSORS: Final = ("none", "bfloat16", "float16", "powersgd", "topk", "qsgd")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How the copies of a stage, over the replicas, combine their gradients.

    Each field is a setting of the group ``conf/outer`` of the same name.

    `bucket_bytes`: the gradients of a stage are summed in buckets of at most so many bytes; a
    parameter that is larger has one of its own. `overlap`: a bucket may leave within the stage's
    last backward, as soon as its last gradient has come; otherwise behind it.

    `compress`: of `COMPRESSORS`, what copies send in place of their gradients; what it loses is
    added to the next step's. `powersgd_rank`: columns of a matrix's factors. `topk_fraction`: of a
    bucket's numbers, those that are sent. `qsgd_levels`: to how many levels a number is rounded, on
    each side of 0.
    """

    bucket_bytes: float = 25e6
    overlap: bool = True
    compress: str = "none"
    powersgd_rank: int = 2
    topk_fraction: float = 0.01
    qsgd_levels: int = 7

    def __post_init__(self) -> None:
        """Refuse what cannot be; raises ConfigError."""
        if not 0 < self.bucket_bytes < math.inf:
            raise ConfigError(
                f"outer.bucket_bytes: expected bytes above 0, got {self.bucket_bytes}; write it as "
                "25MB"
            )
        if self.compress not in COMPRESSORS:
            raise ConfigError(
                f"outer.compress: expected one of {', '.join(COMPRESSORS)}, got {self.compress!r}; "
                f"name one of them"
            )
