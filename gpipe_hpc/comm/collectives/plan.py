"""Plans: what one rank sends and receives in a collective, step by step.

A plan works in place on a flat vector that every rank has. A rank executes its steps in order. No
global clock is needed: messages from one rank to another arrive in the order in which both plans
list them.

Legend: n ranks (`size`); `position` is the index of the plan's rank within the group, from 0.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class ElementSpan(NamedTuple):
    """A range of elements of the vector, from `start` up to `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


class PlanMove(NamedTuple):
    """A span sent to, or received from, the rank at position `peer`."""

    peer: int
    span: ElementSpan


class PlanStep(NamedTuple):
    """Messages exchanged at the same time; the next step begins when all are complete.

    Received elements are added to the vector (`adds`) or overwrite it (`takes`). Several terms for
    one span are added in rank order, including this rank's own value. A step never overwrites a
    span that it sends: terms are added after all sends are complete.
    """

    sends: tuple[PlanMove, ...] = ()
    adds: tuple[PlanMove, ...] = ()
    takes: tuple[PlanMove, ...] = ()


Plan = tuple[PlanStep, ...]


class PlanPosition(NamedTuple):
    """The number of ranks and the position of the rank to which a plan belongs."""

    size: int
    position: int


def moves(peer: int, *spans: ElementSpan) -> tuple[PlanMove, ...]:
    """Return a move to or from rank `peer` for each span that is not empty."""
    return tuple(PlanMove(peer, span) for span in spans if span.length)


def planned(steps: Iterator[PlanStep]) -> Plan:
    """Return the steps as a plan, without empty steps."""
    return tuple(step for step in steps if step.sends or step.adds or step.takes)


def even_counts(count: int, num_parts: int) -> tuple[int, ...]:
    """Divide `count` elements into parts that differ by at most one, the longer ones first."""
    least, num_longer = divmod(count, num_parts)
    return tuple(least + (part < num_longer) for part in range(num_parts))


def spans_of(counts: Sequence[int]) -> tuple[ElementSpan, ...]:
    """Return the spans of consecutive parts with these lengths."""
    ends = list(accumulate(counts, initial=0))
    return tuple(ElementSpan(start, stop) for start, stop in pairwise(ends))


def renamed(plan: Plan, name: Callable[[int], int]) -> Plan:
    """Return a plan in which the position of each peer is mapped by `name`."""

    def each(moved: tuple[PlanMove, ...]) -> tuple[PlanMove, ...]:
        return tuple(PlanMove(name(move.peer), move.span) for move in moved)

    return tuple(PlanStep(each(step.sends), each(step.adds), each(step.takes)) for step in plan)


def shifted(plan: Plan, by: int) -> Plan:
    """Return the plan with all spans moved by `by` elements, for a longer vector."""

    def each(moved: tuple[PlanMove, ...]) -> tuple[PlanMove, ...]:
        return tuple(
            PlanMove(m.peer, ElementSpan(m.span.start + by, m.span.stop + by)) for m in moved
        )

    return tuple(PlanStep(each(step.sends), each(step.adds), each(step.takes)) for step in plan)
