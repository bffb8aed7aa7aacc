"""What each algorithm takes, in closed form: the alpha-beta-gamma model with one port.

A rank sends one message at a time and receives one at a time, both at once. A message of b bytes
takes alpha + b beta; adding b bytes takes b gamma. The forms are those of MPICH's and MVAPICH's
sources; with a number of ranks that is no power of two, those of halving and doubling over shards
are upper bounds.

Legend: n ranks, B bytes of the vector, C bytes of a block; p the greatest power of two within n.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, sqrt
from types import MappingProxyType
from typing import Final, NamedTuple


class Terms(NamedTuple):
    """How often each unit of cost is paid along the longest way through an algorithm."""

    messages: float = 0.0  # times alpha
    moved_bytes: float = 0.0  # times beta
    added_bytes: float = 0.0  # times gamma

    def plus(self, other: "Terms") -> "Terms":
        """Return both, one after the other."""
        return Terms(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: float) -> "Terms":
        """Return this so many times."""
        return Terms(*(number * each for each in self))


class Link(NamedTuple):
    """What connects ranks: alpha in seconds, beta and gamma in seconds a byte."""

    start_s: float
    byte_s: float
    add_s: float = 0.0

    def seconds(self, terms: Terms) -> float:
        """Return what terms take."""
        start_s, byte_s, add_s = self
        return start_s * terms.messages + byte_s * terms.moved_bytes + add_s * terms.added_bytes


Form = Callable[[int, float, float], Terms]
"""Takes n, B and C, which only chains use."""


def _rounds(n: int) -> int:
    """Return log2(n), rounded up."""
    return (n - 1).bit_length()


def _kept(n: int) -> int:
    """Return p."""
    return 1 << (n.bit_length() - 1)


def _ring(n: int, b: float, _: float) -> Terms:
    return Terms(2 * (n - 1), 2 * b * (n - 1) / n, b * (n - 1) / n)


def _recursive_doubling(n: int, b: float, _: float) -> Terms:
    rounds, folds = _kept(n).bit_length() - 1, n != _kept(n)
    return Terms(rounds + 2 * folds, (rounds + 2 * folds) * b, (rounds + folds) * b)


def _rabenseifner(n: int, b: float, _: float) -> Terms:
    p, folds = _kept(n), n != _kept(n)
    share = (p - 1) / p
    rounds = p.bit_length() - 1
    return Terms(2 * rounds + 2 * folds, (2 * share + 2 * folds) * b, (share + folds) * b)


def _tree(n: int, b: float, _: float) -> Terms:
    return Terms(2 * _rounds(n), 2 * _rounds(n) * b, _rounds(n) * b)


def _chain(n: int, b: float, c: float) -> Terms:
    """Return m+2n-3 steps, in m-1 of which a port within the chain carries two messages."""
    m = ceil(b / c)
    if n == 1 or m == 0:
        return Terms()
    sent = m + 2 * n - 3 + (m - 1 if n > 2 and m > 2 else 0)
    return Terms(sent, sent * b / m, (m + n - 2) * b / m)


def _binomial(n: int, b: float, _: float) -> Terms:
    return Terms(_rounds(n), _rounds(n) * b)


def _scatter_ring(n: int, b: float, _: float) -> Terms:
    return Terms(_rounds(n) + n - 1, 2 * b * (n - 1) / n)


def _chain_broadcast(n: int, b: float, c: float) -> Terms:
    m = ceil(b / c)
    return Terms(m + n - 2, (m + n - 2) * b / m) if n > 1 and m else Terms()


def _ring_reduce_scatter(n: int, b: float, _: float) -> Terms:
    return Terms(n - 1, b * (n - 1) / n, b * (n - 1) / n)


def _halving(n: int, b: float, _: float) -> Terms:
    if n == _kept(n):
        return Terms(_rounds(n), b * (n - 1) / n, b * (n - 1) / n)
    core = 2 * b * (_kept(n) - 1) / n  # of spans of two shards at most
    return Terms(_kept(n).bit_length() + 1, b + core + b / n, b + core)


def _ring_all_gather(n: int, b: float, _: float) -> Terms:
    return Terms(n - 1, b * (n - 1) / n)


def _doubling(n: int, b: float, _: float) -> Terms:
    if n == _kept(n):
        return Terms(_rounds(n), b * (n - 1) / n)
    return Terms(_kept(n).bit_length() + 2, b + 2 * b * (_kept(n) - 1) / n)


# The sums in the order of ranks cost what a ring costs: as many messages, as long.
FORMS: Final[Mapping[str, Mapping[str, Form]]] = MappingProxyType(
    {
        "all_reduce": MappingProxyType(
            {
                "ring": _ring,
                "recursive_doubling": _recursive_doubling,
                "rabenseifner": _rabenseifner,
                "tree": _tree,
                "chain": _chain,
                "rank_order": _ring,
            }
        ),
        "broadcast": MappingProxyType(
            {"binomial": _binomial, "scatter_ring": _scatter_ring, "chain": _chain_broadcast}
        ),
        "reduce_scatter": MappingProxyType({"ring": _ring_reduce_scatter, "halving": _halving}),
        "all_gather": MappingProxyType({"ring": _ring_all_gather, "doubling": _doubling}),
    }
)
"""By collective and algorithm."""


def hierarchical_terms(host_sizes: Sequence[int], num_bytes: float) -> tuple[Terms, Terms]:
    """Return the terms of a hierarchical broadcast between hosts, and of that inside them."""
    between = _binomial(len(host_sizes), num_bytes, num_bytes)
    return between, _binomial(max(host_sizes), num_bytes, num_bytes)


def best_block_bytes(collective: str, link: Link, n: int, num_bytes: int) -> int:
    """Return the C with which a chain is fastest: a start-up for each block against the fill.

    The root of what is paid for each block over what is paid for each step of the fill. Of a
    broadcast: C* = sqrt(B alpha / ((n-2) beta)).
    """
    if num_bytes < 1:
        return 1

    def seconds(num_blocks: float) -> float:
        return link.seconds(FORMS[collective]["chain"](n, num_bytes, num_bytes / num_blocks))

    # In the number of blocks m, seconds are a m + b + c / m: three points give a and c.
    at = [seconds(m) for m in (4, 8, 16)]
    c = (at[2] - at[1] - 2 * (at[1] - at[0])) * 16 / 3
    a = ((at[1] - at[0]) + c / 8) / 4
    # Blocks of start-ups that cost nothing are as small as they can be.
    best = 1.0 if c <= 0 else sqrt(c / a) if a > 0 else float(num_bytes)
    whole = (1, 2, floor(best), floor(best) + 1)
    return ceil(num_bytes / min((m for m in whole if 1 <= m <= num_bytes), key=seconds))


def bus_factor(collective: str, n: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests define them."""
    if collective == "broadcast":
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (n - 1) / n
