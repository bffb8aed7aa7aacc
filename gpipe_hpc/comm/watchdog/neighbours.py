"""Neighbour graph of the watchdog: which ranks monitor each other."""


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks that `rank` monitors and that monitor it: those 1, 2, 4, ... positions away.

    There are at most 2 log2(size). Messages passed between neighbours reach all ranks in log2(size)
    hops, even if a whole host of consecutive ranks is lost.
    """
    distances = [1 << power for power in range((size - 1).bit_length())]
    found = {(rank + step) % size for distance in distances for step in (distance, -distance)}
    return sorted(found - {rank})


def opens_connection(rank: int, other: int) -> bool:
    """Return whether `rank` opens the connection between itself and `other`."""
    return rank < other
