"""Refuse sizes of a model that cannot work, before anything is built."""

from types import MappingProxyType
from typing import Final

from gpipe_hpc.errors import ModelError

# How often layers repeat; a level of `depth` has twice the channels of the one above it.
_MOST: Final = MappingProxyType(
    {"num_layers": 65_536, "num_blocks": 8192, "num_convs": 1024, "depth": 24}
)


def check_sizes(model: str, /, **sizes: int) -> None:
    """Raise `ModelError`, naming it, for a size under 1, and for more layers than anybody has."""
    for name, size in sizes.items():
        most = _MOST.get(name.partition("[")[0])
        if most is not None and size > most:
            raise ModelError(
                f"{model}: {name} too large, expected at most {most}, got {size}; lower it"
            )
        if size < 1:
            raise ModelError(
                f"{model}: {name} too small, expected at least 1, got {size}; raise it"
            )


def check_heads(model: str, width: int, num_heads: int) -> None:
    """Raise `ModelError` when the width does not divide among the heads of attention."""
    if width % num_heads:
        raise ModelError(
            f"{model}: width does not divide among the heads, expected a multiple of num_heads="
            f"{num_heads}, got width={width}; change one of the two"
        )


def check_dropout(model: str, dropout: float) -> None:
    """Raise `ModelError` when dropout is no share that leaves something."""
    if not 0.0 <= dropout < 1.0:
        raise ModelError(
            f"{model}: dropout out of range, expected 0 <= p < 1, got {dropout}; lower it"
        )
