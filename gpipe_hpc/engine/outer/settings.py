"""What a user asks of the outer data parallelism."""

import math
from dataclasses import dataclass

from gpipe_hpc.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How the copies of a stage, over the replicas, combine their gradients.

    Each field is a setting of the group ``conf/outer`` of the same name.

    `bucket_bytes`: the gradients of a stage are summed in buckets of at most so many bytes; a
    parameter that is larger has one of its own. `overlap`: a bucket may leave within the stage's
    last backward, as soon as its last gradient has come; otherwise behind it.
    """

    bucket_bytes: float = 25e6
    overlap: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be; raises ConfigError."""
        if not 0 < self.bucket_bytes < math.inf:
            raise ConfigError(
                f"outer.bucket_bytes: expected bytes above 0, got {self.bucket_bytes}; write it as "
                "25MB"
            )
