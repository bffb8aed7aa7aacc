"""Refuse sizes of a model that cannot work, before anything is built."""

from gpipe_hpc.errors import ModelError


def check_sizes(model: str, /, **sizes: int) -> None:
    """Raise `ModelError` for a size under 1, naming it."""
    for name, size in sizes.items():
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
