"""Which algorithm is the fastest over a link, for a size and a number of ranks."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from gpipe_hpc.comm.collectives.costs import FORMS, Link, Terms, best_block_bytes

START_SHARE: Final = 0.05
"""How much of a bucket's time may go into start-ups."""


class Choice(NamedTuple):
    """An algorithm, the block of its chain, and what the model says that it takes."""

    algorithm: str
    block_bytes: int
    seconds: float


def choose(
    collective: str,
    link: Link,
    n: int,
    num_bytes: int,
    among: Sequence[str] | None = None,
) -> Choice:
    """Return the fastest of a collective's algorithms, the first of those that are equal.

    `collective`: all_reduce | broadcast | reduce_scatter | all_gather. `among`: names; None: all.
    """
    names = tuple(FORMS[collective]) if among is None else among
    choices = [predicted(collective, name, link, n, num_bytes) for name in names]
    return min(choices, key=lambda choice: choice.seconds)


def predicted(collective: str, algorithm: str, link: Link, n: int, num_bytes: int) -> Choice:
    """Return what an algorithm takes, a chain with its best block."""
    block = num_bytes or 1
    if algorithm == "chain":
        block = best_block_bytes(collective, link, n, num_bytes)
    return Choice(algorithm, block, link.seconds(terms(collective, algorithm, n, num_bytes, block)))


def terms(collective: str, algorithm: str, n: int, num_bytes: int, block_bytes: int) -> Terms:
    """Return the closed form of an algorithm."""
    return FORMS[collective][algorithm](n, num_bytes, block_bytes)


def bucket_bytes(
    link: Link, n: int, algorithm: str = "ring", share: float = START_SHARE
) -> int | None:
    """Return the smallest bucket whose all-reduce spends no more than `share` on start-ups.

    A smaller one would leave earlier but pay more of them; a larger one hides less behind the
    backward. None where the link takes no time for bytes, or the algorithm has no fixed start-ups.
    """
    one = FORMS["all_reduce"][algorithm]
    starts_s = link.start_s * one(n, 1.0, 1.0).messages
    per_byte_s = link.seconds(one(n, 1.0, 1.0)) - starts_s
    if algorithm == "chain" or per_byte_s <= 0:
        return None
    return max(1, round(starts_s * (1 - share) / (share * per_byte_s)))
