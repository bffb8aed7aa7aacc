"""Plans without any sending: they fit together, end, and send no more than they say."""

from collections import defaultdict

import pytest

from gpipe_hpc.comm.collectives.hierarchy import (
    hierarchical_all_reduce,
    hierarchical_broadcast,
)
from gpipe_hpc.comm.collectives.menu import ALL_GATHERS, ALL_REDUCES, BROADCASTS, REDUCE_SCATTERS
from gpipe_hpc.comm.collectives.plan import (
    Place,
    Span,
    Step,
    blocks_of,
    even_counts,
    moves,
    num_messages,
    num_sent,
    spans_of,
)

SIZES = range(1, 10)
COUNTS = (0, 1, 2, 3, 7, 64, 101)


def families(size, count):
    """Yield a name and the plans of all ranks, of every algorithm."""
    places = [Place(size, i) for i in range(size)]
    for name, planner in ALL_REDUCES.items():
        for block in (1, 5, 1000):
            yield f"all-reduce {name} {block}", [planner(p, count, block) for p in places]
    for name, planner in BROADCASTS.items():
        for root in {0, size // 2, size - 1}:
            yield f"broadcast {name} {root}", [planner(p, root, count, 5) for p in places]
    for hosts in ([0] * size, list(range(size)), [i // 2 for i in range(size)]):
        for root in {0, size - 1}:
            plans = [hierarchical_all_reduce(p, count, hosts) for p in places]
            yield f"all-reduce hierarchical {hosts}", plans
            plans = [hierarchical_broadcast(p, root, count, hosts) for p in places]
            yield f"broadcast hierarchical {hosts} {root}", plans
    for counts in (even_counts(count, size), uneven(count, size)):
        for name, planner in (REDUCE_SCATTERS | ALL_GATHERS).items():
            yield f"{name} {counts}", [planner(p, counts) for p in places]


def uneven(count, size):
    """Cut so that some shards are empty and one is long."""
    return tuple(count if i == size // 2 else 0 for i in range(size))


def messages(plans, kinds):
    """Return, by (from, to), the (step, span) of each message that plans name, in their order."""
    found = defaultdict(list)
    for rank, plan in enumerate(plans):
        for number, step in enumerate(plan):
            for kind in kinds:
                for move in getattr(step, kind):
                    ends = (rank, move.peer) if kind == "sends" else (move.peer, rank)
                    found[ends].append((number, move.span))
    return found


def assert_they_end(plans):
    """Begin a step once its own rank is done with the one before; end it once all peers began."""
    sent, received = messages(plans, ("sends",)), messages(plans, ("adds", "takes"))
    partners = defaultdict(list)  # (rank, step) -> (other rank, its step)
    for (source, destination), out in sent.items():
        for (number, _), (other, _) in zip(out, received[source, destination], strict=True):
            partners[source, number].append((destination, other))
            partners[destination, other].append((source, number))
    at = [0] * len(plans)
    while any(step < len(plan) for step, plan in zip(at, plans, strict=True)):
        ready = [
            rank
            for rank, step in enumerate(at)
            if step < len(plans[rank]) and all(at[r] >= n for r, n in partners[rank, step])
        ]
        assert ready, f"every rank waits: {at}"
        for rank in ready:
            at[rank] += 1


def overlap(one, other):
    return max(one.start, other.start) < min(one.stop, other.stop)


@pytest.mark.parametrize("size", SIZES)
def test_what_one_sends_another_expects_and_nobody_waits_in_a_ring(size):
    for count in COUNTS:
        for name, plans in families(size, count):
            sent, received = messages(plans, ("sends",)), messages(plans, ("adds", "takes"))
            assert sent.keys() == received.keys(), name
            for ends, out in sent.items():
                assert [s for _, s in out] == [s for _, s in received[ends]], (name, ends)
            assert all(a != b and 0 <= a < size and 0 <= b < size for a, b in sent), name
            assert_they_end(plans)


@pytest.mark.parametrize("size", SIZES)
def test_a_step_overwrites_nothing_that_it_sends_or_that_another_message_brings(size):
    for count in COUNTS:
        for name, plans in families(size, count):
            for step in (step for plan in plans for step in plan):
                for take in step.takes:
                    others = [*step.sends, *step.adds, *(t for t in step.takes if t is not take)]
                    assert not any(overlap(take.span, other.span) for other in others), name
                spans = sorted({move.span for move in step.adds})
                assert not any(map(overlap, spans, spans[1:])), name


def test_these_rules_see_what_they_forbid():
    whole = Span(0, 2)
    sends_first = [(Step(sends=moves(i, whole)), Step(takes=moves(i, whole))) for i in (1, 0)]
    with pytest.raises(AssertionError, match="every rank waits"):
        assert_they_end(sends_first)
    assert_they_end([sends_first[0], sends_first[1][::-1]])
    assert overlap(Span(0, 2), Span(1, 3)) and not overlap(Span(0, 2), Span(2, 3))


def test_shards_and_blocks_cover_the_vector():
    for count in COUNTS:
        for size in SIZES:
            counts = even_counts(count, size)
            assert sum(counts) == count and max(counts) - min(counts) <= 1
            assert [s.length for s in spans_of(counts)] == list(counts)
        for block in (1, 5, 1000):
            spans = blocks_of(count, block)
            assert sum(s.length for s in spans) == count
            assert all(0 < s.length <= block for s in spans)


def test_no_step_is_empty_and_messages_are_counted():
    for name, plans in families(6, 3):
        for plan in plans:
            assert all(step.sends or step.adds or step.takes for step in plan), name
            assert num_messages(plan) <= num_sent(plan), name
