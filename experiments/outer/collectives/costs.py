"""Closed forms of the algorithms in the alpha-beta-gamma model with one port.

A rank sends one message at a time and receives one at a time, both at once. A message of b bytes
takes alpha + b beta; adding b bytes takes b gamma. The forms are those of MPICH's and MVAPICH's
sources. They are upper bounds for halving and doubling over shards if the number of ranks is not a
power of two, and for pipelined trees with branches.

Legend: n ranks, B bytes of the vector, C bytes of a block, g ranks per host, p the largest power of
two up to n, h the number of hosts.
"""

from collections.abc import Callable, Mapping
from math import ceil, floor, sqrt
from operator import add
from types import MappingProxyType
from typing import Final, NamedTuple

from experiments.outer.collectives.menu import RADIX, hosts_of
from experiments.outer.collectives.trees import Tree, double_binary_trees, two_level_tree


class Terms(NamedTuple):
    """Multiples of alpha, beta and gamma along the critical path of an algorithm."""

    messages: float = 0.0  # times alpha
    moved_bytes: float = 0.0  # times beta
    added_bytes: float = 0.0  # times gamma

    def plus(self, other: "Terms") -> "Terms":
        """Return the sum of both: one algorithm after the other."""
        return Terms(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: float) -> "Terms":
        """Return a multiple of the terms."""
        return Terms(*(number * each for each in self))


class Link(NamedTuple):
    """Alpha in seconds; beta and gamma in seconds per byte."""

    start_s: float
    byte_s: float
    add_s: float = 0.0

    def seconds(self, terms: Terms) -> float:
        """Return the time of the terms over this link."""
        start_s, byte_s, add_s = self
        return start_s * terms.messages + byte_s * terms.moved_bytes + add_s * terms.added_bytes


Form = Callable[[int, float, float, int], Terms]
"""Takes n, B, C and g."""


def _rounds(n: int) -> int:
    """Return log2(n), rounded up."""
    return (n - 1).bit_length()


def _kept(n: int) -> int:
    """Return p, the largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


def _hosts(n: int, g: int) -> int:
    """Return h, the number of hosts."""
    return ceil(n / g)


def _ring(n: int, b: float, c: float, g: int) -> Terms:
    return Terms(2 * (n - 1), 2 * b * (n - 1) / n, b * (n - 1) / n)


def _recursive_doubling(n: int, b: float, c: float, g: int) -> Terms:
    rounds, folds = _kept(n).bit_length() - 1, n != _kept(n)
    return Terms(rounds + 2 * folds, (rounds + 2 * folds) * b, (rounds + folds) * b)


def _rabenseifner(n: int, b: float, c: float, g: int) -> Terms:
    p, folds = _kept(n), n != _kept(n)
    share = (p - 1) / p
    rounds = p.bit_length() - 1
    return Terms(2 * rounds + 2 * folds, (2 * share + 2 * folds) * b, (share + folds) * b)


def _tree(n: int, b: float, c: float, g: int) -> Terms:
    return Terms(2 * _rounds(n), 2 * _rounds(n) * b, _rounds(n) * b)


def _chain(n: int, b: float, c: float, g: int) -> Terms:
    """Return m+2n-3 steps for m blocks; in m-1 of them a port within the chain has two messages."""
    m = ceil(b / c)
    if n == 1 or m == 0:
        return Terms()
    sent = m + 2 * n - 3 + (m - 1 if n > 2 and m > 2 else 0)
    return Terms(sent, sent * b / m, (m + n - 2) * b / m)


def _double_binary_tree(n: int, b: float, c: float, g: int) -> Terms:
    """Return 2 B beta, one start-up per message, and a fill of about 4 log2(n) messages.

    Half of the vector uses each tree. For each block, a rank that has children in one tree and is a
    leaf of the other sends and receives four messages: one up and two down, and one up.
    """
    m = ceil(b / 2 / c)
    if n == 1 or m == 0:
        return Terms()
    trees = double_binary_trees(n)
    children = [sum(len(tree.children(i)) for tree in trees) for i in range(n)]
    upwards = [sum(tree.parents[i] is not None for tree in trees) for i in range(n)]
    fill = max(tree.fill for tree in trees)
    messages = 2 * fill + (m - 1) * max(map(add, children, upwards))
    added = fill + (m - 1) * max(children)
    return Terms(messages, messages * b / 2 / m, added * b / 2 / m)


def _hierarchical(n: int, b: float, c: float, g: int) -> Terms:
    """Return a reduce-scatter within hosts, an all-reduce per shard between them, an all-gather.

    There are as many shards as the host with the fewest ranks has ranks.
    """
    h = _hosts(n, g)
    largest, shards = min(n, g), n - (h - 1) * g
    inside = Terms(largest - 1, (largest - 1) * b / shards)
    inside = inside.times(2).plus(Terms(added_bytes=inside.moved_bytes))
    return inside.plus(_ring(h, b / shards, c, g))


def _binomial(n: int, b: float, c: float, g: int) -> Terms:
    return Terms(_rounds(n), _rounds(n) * b)


def _knomial(n: int, b: float, c: float, g: int) -> Terms:
    """Return k-1 messages for each of log_k(n) rounds, fewer in the last if ranks run out."""
    messages, distance = 0, 1
    while distance < n:
        messages += min(RADIX - 1, ceil((n - distance) / distance))
        distance *= RADIX
    return Terms(messages, messages * b)


def _scatter_ring(n: int, b: float, c: float, g: int) -> Terms:
    return Terms(_rounds(n) + n - 1, 2 * b * (n - 1) / n)


def _scatter_doubling(n: int, b: float, c: float, g: int) -> Terms:
    return Terms(_rounds(n), b * (n - 1) / n).plus(_doubling(n, b, c, g))


def _chain_broadcast(n: int, b: float, c: float, g: int) -> Terms:
    m = ceil(b / c)
    return Terms(m + n - 2, (m + n - 2) * b / m) if n > 1 and m else Terms()


def _binomials(n: int, b: float, c: float, g: int) -> Terms:
    """Return a binomial tree of the leaders, then one within each host."""
    return _binomial(_hosts(n, g), b, c, g).plus(_binomial(min(n, g), b, c, g))


def _along(tree: Tree, b: float, c: float) -> Terms:
    """Return the fill up to the deepest rank, then one block per turn of the widest rank."""
    m = ceil(b / c)
    if len(tree.parents) == 1 or m == 0:
        return Terms()
    messages = tree.fill + (m - 1) * tree.fan_out
    return Terms(messages, messages * b / m)


def _two_level(n: int, b: float, c: float, g: int) -> Terms:
    return _along(two_level_tree(hosts_of(n, g), 0), b, c)


def _nccl_hierarchical(n: int, b: float, c: float, g: int) -> Terms:
    return _along(two_level_tree(hosts_of(n, g), 0, RADIX), b, c)


def _adding(form: Form) -> Form:
    """Return the form of a reduce along the tree of a broadcast, in which all bytes are added."""

    def reduce(n: int, b: float, c: float, g: int) -> Terms:
        messages, moved_bytes, _ = form(n, b, c, g)
        return Terms(messages, moved_bytes, moved_bytes)

    return reduce


def _chain_binomial(n: int, b: float, c: float, g: int) -> Terms:
    inside = _adding(_chain_broadcast)(min(n, g), b, c, g)
    return inside.plus(_adding(_binomial)(_hosts(n, g), b, c, g))


def _ring_reduce_scatter(n: int, b: float, c: float, g: int) -> Terms:
    return Terms(n - 1, b * (n - 1) / n, b * (n - 1) / n)


def _halving(n: int, b: float, c: float, g: int) -> Terms:
    if n == _kept(n):
        return Terms(_rounds(n), b * (n - 1) / n, b * (n - 1) / n)
    core = 2 * b * (_kept(n) - 1) / n  # of spans of at most two shards
    return Terms(_kept(n).bit_length() + 1, b + core + b / n, b + core)


def _ring_all_gather(n: int, b: float, c: float, g: int) -> Terms:
    return Terms(n - 1, b * (n - 1) / n)


def _doubling(n: int, b: float, c: float, g: int) -> Terms:
    if n == _kept(n):
        return Terms(_rounds(n), b * (n - 1) / n)
    return Terms(_kept(n).bit_length() + 2, b + 2 * b * (_kept(n) - 1) / n)


# Sums in the order of ranks cost as much as a ring: equal messages.
FORMS: Final[Mapping[str, Mapping[str, Form]]] = MappingProxyType(
    {
        "all_reduce": MappingProxyType(
            {
                "ring": _ring,
                "recursive_doubling": _recursive_doubling,
                "rabenseifner": _rabenseifner,
                "tree": _tree,
                "chain": _chain,
                "double_binary_tree": _double_binary_tree,
                "hierarchical": _hierarchical,
                "rank_order": _ring,
            }
        ),
        "broadcast": MappingProxyType(
            {
                "binomial": _binomial,
                "knomial": _knomial,
                "scatter_ring": _scatter_ring,
                "scatter_doubling": _scatter_doubling,
                "chain": _chain_broadcast,
                "hierarchical": _binomials,
                "two_level": _two_level,
                "nccl_hierarchical": _nccl_hierarchical,
            }
        ),
        "reduce": MappingProxyType(
            {
                "binomial": _adding(_binomial),
                "chain": _adding(_chain_broadcast),
                "chain_binomial": _chain_binomial,
                "chain_chain": _adding(_two_level),
            }
        ),
        "reduce_scatter": MappingProxyType({"ring": _ring_reduce_scatter, "halving": _halving}),
        "all_gather": MappingProxyType({"ring": _ring_all_gather, "doubling": _doubling}),
    }
)
"""By collective and algorithm."""
PIPELINED: Final = frozenset(
    {
        "chain",
        "double_binary_tree",
        "two_level",
        "nccl_hierarchical",
        "chain_binomial",
        "chain_chain",
    }
)
"""The algorithms that cut the vector into blocks."""


def best_block_bytes(
    collective: str, algorithm: str, link: Link, n: int, num_bytes: int, g: int = 1
) -> int:
    """Return the block size C with which a pipeline is fastest.

    It balances the start-up of each block against the fill. For a broadcast along a chain: C* =
    sqrt(B alpha / ((n-2) beta)).
    """
    if num_bytes < 1:
        return 1

    def seconds(num_blocks: float) -> float:
        return link.seconds(FORMS[collective][algorithm](n, num_bytes, num_bytes / num_blocks, g))

    # The time is a m + b + c / m for m blocks; three points give a and c.
    at = [seconds(m) for m in (4, 8, 16)]
    c = (at[2] - at[1] - 2 * (at[1] - at[0])) * 16 / 3
    a = ((at[1] - at[0]) + c / 8) / 4
    # If start-ups are free, blocks are as small as possible.
    best = 1.0 if c <= 0 else sqrt(c / a) if a > 0 else float(num_bytes)
    whole = (1, 2, floor(best), floor(best) + 1)
    return ceil(num_bytes / min((m for m in whole if 1 <= m <= num_bytes), key=seconds))


def bus_factor(collective: str, n: int) -> float:
    """Return the ratio of bus bandwidth and algorithm bandwidth as nccl-tests define it."""
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (n - 1) / n
