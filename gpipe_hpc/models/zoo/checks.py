"""Checks of the sizes of a model before it is built."""

from types import MappingProxyType
from typing import Final

from gpipe_hpc.errors import ModelError

# Upper limits; each level of `depth` doubles the number of channels.
_MOST: Final = MappingProxyType(
    {"num_layers": 65_536, "num_blocks": 8192, "num_convs": 1024, "depth": 24}
)


def check_sizes(model: str, /, **sizes: int) -> None:
    """Raise `ModelError` for a size below 1 or an implausibly large number of layers."""
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
    """Raise `ModelError` if the width is not divisible by the number of attention heads."""
    if width % num_heads:
        raise ModelError(
            f"{model}: width must be a multiple of num_heads={num_heads}, got width={width}; "
            f"change one of the two"
        )


def check_dropout(model: str, dropout: float) -> None:
    """Raise `ModelError` if dropout is not at least 0 and less than 1."""
    if not 0.0 <= dropout < 1.0:
        raise ModelError(
            f"{model}: dropout out of range, expected 0 <= p < 1, got {dropout}; lower it"
        )
