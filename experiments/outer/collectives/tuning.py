"""The fastest algorithm over a link, by size and number of ranks."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from experiments.outer.collectives.costs import FORMS, PIPELINED, Link, best_block_bytes

START_SHARE: Final = 0.05
"""Share of a bucket's time that start-ups may take."""


class Choice(NamedTuple):
    """An algorithm, its block size, and its time by the model."""

    algorithm: str
    block_bytes: int
    seconds: float


def choose(
    collective: str,
    link: Link,
    n: int,
    num_bytes: int,
    among: Sequence[str] | None = None,
    g: int = 1,
) -> Choice:
    """Return the fastest algorithm of a collective; the first one if several are equal.

    `among` restricts the names; `g` is the number of ranks per host.
    """
    names = tuple(FORMS[collective]) if among is None else among
    choices = [predicted(collective, name, link, n, num_bytes, g) for name in names]
    return min(choices, key=lambda choice: choice.seconds)


def predicted(
    collective: str, algorithm: str, link: Link, n: int, num_bytes: int, g: int = 1
) -> Choice:
    """Return the time of an algorithm, with the best block size if it is pipelined."""
    block = num_bytes or 1
    if algorithm in PIPELINED:
        block = best_block_bytes(collective, algorithm, link, n, num_bytes, g)
    terms = FORMS[collective][algorithm](n, num_bytes, block, g)
    return Choice(algorithm, block, link.seconds(terms))


class Crossover(NamedTuple):
    """A size from which `after` is faster than `before`."""

    num_bytes: int
    before: str
    after: str


def crossovers(
    collective: str,
    link: Link,
    n: int,
    between: tuple[int, int],
    among: Sequence[str] | None = None,
    g: int = 1,
) -> list[Crossover]:
    """Return the sizes at which the fastest closed form changes, ascending.

    Compares four sizes per octave, then bisects to a byte.
    """

    def fastest(num_bytes: int) -> str:
        return choose(collective, link, n, num_bytes, among, g).algorithm

    least, most = between
    sizes, size = [least], float(least)
    while size < most:
        size *= 2**0.25
        sizes.append(min(most, max(round(size), sizes[-1] + 1)))
    found = []
    for low, high in pairwise(sizes):
        before, after = fastest(low), fastest(high)
        if before == after:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if fastest(middle) == before:
                low = middle
            else:
                high, after = middle, fastest(middle)
        found.append(Crossover(high, before, after))
    return found


def bucket_bytes(
    link: Link, n: int, algorithm: str = "ring", share: float = START_SHARE
) -> int | None:
    """Return the smallest bucket whose all-reduce spends at most `share` of its time on start-ups.

    A smaller bucket would start earlier but pay more start-ups; a larger one overlaps less with the
    backward. None if the time of the link does not depend on bytes, or the algorithm is pipelined.
    """
    one = FORMS["all_reduce"][algorithm]
    starts_s = link.start_s * one(n, 1.0, 1.0, 1).messages
    per_byte_s = link.seconds(one(n, 1.0, 1.0, 1)) - starts_s
    if algorithm in PIPELINED or per_byte_s <= 0:
        return None
    return max(1, round(starts_s * (1 - share) / (share * per_byte_s)))
