"""Who watches whom."""


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks that `rank` watches and that watch it: those 1, 2, 4, ... places away.

    At most 2 log2(size). News passed from neighbour to neighbour reach all in log2(size) hops, also
    where a whole host of consecutive ranks is gone.
    """
    distances = [1 << power for power in range((size - 1).bit_length())]
    found = {(rank + step) % size for distance in distances for step in (distance, -distance)}
    return sorted(found - {rank})


def dials(rank: int, other: int) -> bool:
    """Say whether `rank` opens the connection between the two, rather than `other`."""
    return rank < other
