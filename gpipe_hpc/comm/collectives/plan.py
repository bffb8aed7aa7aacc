"""What one rank sends and receives in a collective, step by step.

A plan is about a flat vector that every rank holds, in place. The steps of a rank follow one
another; the plans of all ranks fit together without any common clock, because the messages from
one rank to another come in the order in which both plans name them.

Legend: n ranks (`size`), of which this is `position`; both count within the group, from 0.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """Elements of the vector, from `start` up to `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


class Move(NamedTuple):
    """A span that goes to, or comes from, the rank at position `peer`."""

    peer: int
    span: Span


class Step(NamedTuple):
    """What happens at the same time. The next step begins when all of it is done.

    What comes is added to what is there (`adds`) or put in its place (`takes`). Several that are
    added to one span are added in the order of ranks, this rank's own value among them. No span is
    sent and overwritten in one step: what is added waits until everything has left.
    """

    sends: tuple[Move, ...] = ()
    adds: tuple[Move, ...] = ()
    takes: tuple[Move, ...] = ()


Plan = tuple[Step, ...]


class Place(NamedTuple):
    """Whose plan it is: the number of ranks and the position among them."""

    size: int
    position: int


def moves(peer: int, *spans: Span) -> tuple[Move, ...]:
    """Return the moves of these spans to or from one rank; empty spans are not sent."""
    return tuple(Move(peer, span) for span in spans if span.length)


def planned(steps: Iterator[Step]) -> Plan:
    """Return the steps in which anything happens."""
    return tuple(step for step in steps if step.sends or step.adds or step.takes)


def even_counts(count: int, num_parts: int) -> tuple[int, ...]:
    """Cut `count` elements into parts that differ by one at most, the longer ones first."""
    least, num_longer = divmod(count, num_parts)
    return tuple(least + (part < num_longer) for part in range(num_parts))


def spans_of(counts: Sequence[int]) -> tuple[Span, ...]:
    """Return where parts of these lengths lie, one behind the other."""
    ends = list(accumulate(counts, initial=0))
    return tuple(Span(start, stop) for start, stop in pairwise(ends))


def renamed(plan: Plan, name: Callable[[int], int]) -> Plan:
    """Return a plan in which each peer is called by another position."""

    def each(moved: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(Move(name(move.peer), move.span) for move in moved)

    return tuple(Step(each(step.sends), each(step.adds), each(step.takes)) for step in plan)


def shifted(plan: Plan, by: int) -> Plan:
    """Return a plan for the elements from `by` on of a longer vector."""

    def each(moved: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(Move(m.peer, Span(m.span.start + by, m.span.stop + by)) for m in moved)

    return tuple(Step(each(step.sends), each(step.adds), each(step.takes)) for step in plan)
