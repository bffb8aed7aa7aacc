"""Plans without any sending: they fit together, end, and send no more than they say."""

import pytest

from gpipe_hpc.comm.collectives.bruck import binomial_scatter, bruck_all_gather
from gpipe_hpc.comm.collectives.direct import rank_order_all_reduce, rank_order_reduce_scatter
from gpipe_hpc.comm.collectives.halving import (
    butterfly_all_reduce,
    halving_reduce_scatter,
    rabenseifner_all_reduce,
)
from gpipe_hpc.comm.collectives.hierarchy import hierarchical_all_reduce
from gpipe_hpc.comm.collectives.plan import (
    ElementSpan,
    PlanPosition,
    PlanStep,
    even_counts,
    moves,
    spans_of,
)
from gpipe_hpc.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from gpipe_hpc.comm.collectives.tree import binomial_broadcast, scatter_ring_broadcast
from tests.comm.collectives.fitting_plans import (
    assert_they_end,
    assert_they_fit,
    num_messages,
    num_sent,
    overlap,
)

SIZES = range(1, 10)
COUNTS = (0, 1, 2, 3, 7, 64, 101)


def families(size, count):
    """Yield a name and the plans of all ranks, of every algorithm."""
    places = [PlanPosition(size, i) for i in range(size)]
    for planner in (
        ring_all_reduce,
        rank_order_all_reduce,
        butterfly_all_reduce,
        rabenseifner_all_reduce,
    ):
        yield planner.__name__, [planner(p, count) for p in places]
    for planner in (binomial_broadcast, scatter_ring_broadcast):
        for root in {0, size // 2, size - 1}:
            yield f"{planner.__name__} {root}", [planner(p, root, count) for p in places]
    for hosts in ([0] * size, list(range(size)), [i // 2 for i in range(size)]):
        plans = [hierarchical_all_reduce(p, count, hosts) for p in places]
        yield f"hierarchical {hosts}", plans
    for counts in (even_counts(count, size), uneven(count, size)):
        for planner in (
            ring_reduce_scatter,
            ring_all_gather,
            rank_order_reduce_scatter,
            halving_reduce_scatter,
            bruck_all_gather,
            binomial_scatter,
        ):
            yield f"{planner.__name__} {counts}", [planner(p, counts) for p in places]


def uneven(count, size):
    """Cut so that some shards are empty and one is long."""
    return tuple(count if i == size // 2 else 0 for i in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_plans_fit_together(size):
    for count in COUNTS:
        for name, plans in families(size, count):
            assert_they_fit(plans, name)


def test_these_rules_see_what_they_forbid():
    whole = ElementSpan(0, 2)
    sends_first = [
        (PlanStep(sends=moves(i, whole)), PlanStep(takes=moves(i, whole))) for i in (1, 0)
    ]
    with pytest.raises(AssertionError, match="every rank waits"):
        assert_they_end(sends_first)
    assert_they_end([sends_first[0], sends_first[1][::-1]])
    assert overlap(ElementSpan(0, 2), ElementSpan(1, 3)) and not overlap(
        ElementSpan(0, 2), ElementSpan(2, 3)
    )


def test_shards_cover_the_vector():
    for count in COUNTS:
        for size in SIZES:
            counts = even_counts(count, size)
            assert sum(counts) == count and max(counts) - min(counts) <= 1
            assert [s.length for s in spans_of(counts)] == list(counts)


def test_no_step_is_empty_and_messages_are_counted():
    for name, plans in families(6, 3):
        for plan in plans:
            assert all(step.sends or step.adds or step.takes for step in plan), name
            assert num_messages(plan) <= num_sent(plan), name
