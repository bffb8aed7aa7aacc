"""Trees along which a vector is sent, whole or in blocks: chains, k-nomial, two levels, binary.

A pipelined tree sends block after block: a rank at depth d forwards block k in step d + k. After
the first block has reached the deepest rank, every edge carries a block in each step. The best
block size balances that fill against one start-up per block.

Legend: n ranks; positions count within the group, from 0; `root` is the position that has the
vector, or gets the sum.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from gpipe_hpc.comm.collectives.plan import (
    ElementSpan,
    Plan,
    PlanMove,
    PlanPosition,
    PlanStep,
    even_counts,
    moves,
    planned,
    renamed,
    spans_of,
)
from gpipe_hpc.comm.collectives.tree import binomial_broadcast


class Tree(NamedTuple):
    """The parent of each position; None for the root."""

    parents: tuple[int | None, ...]

    def children(self, position: int) -> tuple[int, ...]:
        """Return the positions to which a position forwards, in ascending order."""
        return _children(self)[position]

    def path(self, position: int) -> list[int]:
        """Return the positions from the root to this one, both included."""
        found, at = [position], self.parents[position]
        while at is not None:
            found.append(at)
            at = self.parents[at]
        return found[::-1]

    def depth(self, position: int) -> int:
        """Return the number of edges from the root to a position."""
        return len(self.path(position)) - 1

    @property
    def height(self) -> int:
        """Return the greatest depth."""
        return max(map(self.depth, range(len(self.parents))))

    @property
    def fan_out(self) -> int:
        """Return the largest number of children."""
        return max(map(len, _children(self)))

    @property
    def fill(self) -> int:
        """Return the number of sequential messages until the first block is everywhere.

        A rank with several children serves them one after the other through its port.
        """
        paths = map(self.path, range(len(self.parents)))
        return max(sum(len(self.children(each)) for each in path[:-1]) for path in paths)


@lru_cache(maxsize=256)
def _children(tree: Tree) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in tree.parents]
    for position, parent in enumerate(tree.parents):
        if parent is not None:
            found[parent].append(position)
    return tuple(map(tuple, found))


# Trees.


def chain(members: Sequence[int]) -> dict[int, int | None]:
    """Return the parents of a chain."""
    return dict(zip(members, [None, *members[:-1]], strict=True))


def knomial(members: Sequence[int], radix: int) -> dict[int, int | None]:
    """Return the parents of a k-nomial tree; radix 2 is binomial."""

    def parent(number: int) -> int | None:
        distance = 1
        while distance * radix <= number:
            distance *= radix
        return None if number == 0 else members[number % distance]

    return {each: parent(number) for number, each in enumerate(members)}


def members_of(hosts: Sequence[int], root: int) -> list[list[int]]:
    """Return the positions of each host, its leader first.

    The root leads its host; other hosts are led by their first position after the root.
    """
    found: dict[int, list[int]] = {}
    for position in sorted(range(len(hosts)), key=lambda i: (i - root) % len(hosts)):
        found.setdefault(hosts[position], []).append(position)
    return list(found.values())


@lru_cache(maxsize=256)
def chain_tree(n: int, root: int) -> Tree:
    """Return the chain that starts at the root and wraps around."""
    parents = chain([(root + i) % n for i in range(n)])
    return Tree(tuple(parents[i] for i in range(n)))


@lru_cache(maxsize=256)
def two_level_tree(hosts: tuple[int, ...], root: int, radix: int | None = None) -> Tree:
    """Return a tree over the leaders of the hosts, and a chain from each leader within its host.

    `hosts` has the host of each position. The tree over the leaders is k-nomial with `radix`, or a
    chain if it is None.
    """
    inside = members_of(hosts, root)
    leaders = [each[0] for each in inside]
    parents: dict[int, int | None] = {}
    for each in inside:
        parents |= chain(each)
    parents |= chain(leaders) if radix is None else knomial(leaders, radix)
    return Tree(tuple(parents[i] for i in range(len(hosts))))


@lru_cache(maxsize=256)
def double_binary_trees(n: int) -> tuple[Tree, Tree]:
    """Return two binary trees of which each rank is a leaf of one (Sanders, Speck, Traeff, 2009).

    As NCCL builds them: odd ranks are the leaves of the first; the second is its mirror image if n
    is even, and the first one shifted by a rank if n is odd.
    """

    def parent(i: int) -> int | None:
        low = i & -i
        up = (i ^ low) | (low << 1)
        return None if i == 0 else up if up < n else i ^ low

    first = [parent(i) for i in range(n)]

    def other(i: int) -> int:
        return n - 1 - i if n % 2 == 0 else (i + 1) % n

    second: list[int | None] = [None] * n
    for i, up in enumerate(first):
        second[other(i)] = None if up is None else other(up)
    return Tree(tuple(first)), Tree(tuple(second))


def blocks_of(count: int, block: int) -> tuple[ElementSpan, ...]:
    """Split `count` elements into blocks of `block`; the last one may be shorter."""
    return tuple(ElementSpan(start, min(start + block, count)) for start in range(0, count, block))


# Pipelines along trees. The time of a step is the same on all ranks.


class _Times:
    """Messages of one position with their time steps."""

    def __init__(self, tree: Tree, position: int) -> None:
        self._depth, self._height = tree.depth(position), tree.height
        self._parent, self._children = tree.parents[position], tree.children(position)
        self.up: list[tuple[int, PlanMove]] = []
        self.down: list[tuple[int, PlanMove]] = []
        self.adds: list[tuple[int, PlanMove]] = []
        self.takes: list[tuple[int, PlanMove]] = []

    def broadcast_down(self, blocks: Sequence[ElementSpan], begin: int = 0) -> None:
        """Add messages that forward blocks from the root to all."""
        for time, span in enumerate(blocks, begin + self._depth):
            self.down += [(time, move) for child in self._children for move in moves(child, span)]
            if self._parent is not None:
                self.takes += [(time - 1, move) for move in moves(self._parent, span)]

    def sum_up(self, blocks: Sequence[ElementSpan]) -> None:
        """Add messages that sum blocks from all ranks to the root."""
        for time, span in enumerate(blocks, self._height - self._depth):
            self.adds += [
                (time - 1, move) for child in self._children for move in moves(child, span)
            ]
            if self._parent is not None:
                self.up += [(time, move) for move in moves(self._parent, span)]


def _plan_of(*parts: _Times) -> Plan:
    """Return the plan in which messages with equal time are one step.

    Two ranks may be neighbours in both trees. Messages to be added come first within a step,
    because a step expects them first.
    """
    steps: dict[int, tuple[list[PlanMove], ...]] = {}
    for kind, name in enumerate(("up", "down", "adds", "takes")):
        for part in parts:
            for time, move in getattr(part, name):
                steps.setdefault(time, ([], [], [], []))[kind].append(move)
    return tuple(
        PlanStep((*up, *down), tuple(adds), tuple(takes))
        for _, (up, down, adds, takes) in sorted(steps.items())
    )


def pipelined_broadcast(place: PlanPosition, tree: Tree, count: int, block: int) -> Plan:
    """Return the plan of a broadcast of the root's vector, block after block."""
    own = _Times(tree, place.position)
    own.broadcast_down(blocks_of(count, block))
    return _plan_of(own)


def pipelined_reduce(place: PlanPosition, tree: Tree, count: int, block: int) -> Plan:
    """Return the plan of a sum at the root, block after block; others end with partial sums."""
    own = _Times(tree, place.position)
    own.sum_up(blocks_of(count, block))
    return _plan_of(own)


def pipelined_all_reduce(
    place: PlanPosition, trees: Sequence[Tree], count: int, block: int
) -> Plan:
    """Sum a part of the vector along each tree to its root, and send it back immediately.

    ```text
    a chain  0      1      2      3      4
    0 -> 1   b0     b1
    1 -> 2          b0     b1            (sums)
    2 -> 1                 b0     b1
    1 -> 0                        b0     b1
    ```
    """
    parts = []
    for tree, part in zip(trees, spans_of(even_counts(count, len(trees))), strict=True):
        own = _Times(tree, place.position)
        blocks = [
            ElementSpan(part.start + each.start, part.start + each.stop)
            for each in blocks_of(part.length, block)
        ]
        own.sum_up(blocks)
        own.broadcast_down(blocks, begin=tree.height)
        parts.append(own)
    return _plan_of(*parts)


# Trees whose ranks send the whole vector to one child after the other.


def knomial_broadcast(place: PlanPosition, root: int, count: int, radix: int) -> Plan:
    """Return a broadcast in which every rank with the vector sends it to k-1 others per round."""

    def steps() -> Iterator[PlanStep]:
        n, i = place.size, (place.position - root) % place.size
        whole, distance = ElementSpan(0, count), 1
        while distance < n:
            if i < distance:
                others = range(i + distance, min(radix * distance, n), distance)
                yield PlanStep(sends=tuple(move for each in others for move in moves(each, whole)))
            elif i < radix * distance:
                yield PlanStep(takes=moves(i % distance, whole))
            distance *= radix

    return _from(root, place, planned(steps()))


def binomial_reduce(place: PlanPosition, root: int, count: int) -> Plan:
    """Return the plan of a sum at the root; others end with partial sums."""

    def steps() -> Iterator[PlanStep]:
        n, i = place.size, (place.position - root) % place.size
        whole, distance = ElementSpan(0, count), 1
        while distance < n:
            if i & distance:
                yield PlanStep(sends=moves(i - distance, whole))
                return
            if i + distance < n:
                yield PlanStep(adds=moves(i + distance, whole))
            distance *= 2

    return _from(root, place, planned(steps()))


def tree_all_reduce(place: PlanPosition, count: int) -> Plan:
    """Reduce to the first rank along a binomial tree, then broadcast from there."""
    return binomial_reduce(place, 0, count) + binomial_broadcast(place, 0, count)


def hierarchical_broadcast(
    place: PlanPosition, root: int, count: int, hosts: Sequence[int]
) -> Plan:
    """Return a binomial broadcast over one rank per host, then one within each host."""
    leaders, inside = _levels(place, root, hosts)
    plan: Plan = ()
    if place.position in leaders:
        plan += _among(leaders, place, lambda own: binomial_broadcast(own, 0, count))
    return plan + _among(inside, place, lambda own: binomial_broadcast(own, 0, count))


def chain_binomial_reduce(
    place: PlanPosition, root: int, count: int, block: int, hosts: Sequence[int]
) -> Plan:
    """Return a pipelined chain within each host, then a binomial tree of the leaders.

    S-Caffe's hierarchical reduce, for groups of 8 called CB-8 (Awan et al., PPoPP 2017).
    """
    leaders, inside = _levels(place, root, hosts)

    def in_a_chain(own: PlanPosition) -> Plan:
        return pipelined_reduce(own, chain_tree(own.size, 0), count, block)

    plan = _among(inside, place, in_a_chain)
    if place.position in leaders:
        plan += _among(leaders, place, lambda own: binomial_reduce(own, 0, count))
    return plan


def _levels(place: PlanPosition, root: int, hosts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the leaders of hosts, and the positions of this rank's host."""
    inside = members_of(hosts, root)
    own = next(each for each in inside if place.position in each)
    return [each[0] for each in inside], own


def _among(
    members: Sequence[int], place: PlanPosition, plan: Callable[[PlanPosition], Plan]
) -> Plan:
    """Return a plan of some of the ranks, the first of which is its root."""
    own = PlanPosition(len(members), members.index(place.position))
    return renamed(plan(own), members.__getitem__)


def _from(root: int, place: PlanPosition, plan: Plan) -> Plan:
    """Return a plan for root 0 as one for another root."""
    return renamed(plan, lambda peer: (peer + root) % place.size)
