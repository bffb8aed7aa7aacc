"""A cut that gives each rank no more than it may fill, where the fastest one does not."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc.comm.device import device_to_come
from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import normalise_layers
from gpipe_hpc.planning import Counted, Example, Request, lay_out
from gpipe_hpc.planning.cutting.uneven import cut_where
from gpipe_hpc.planning.forecast import held_bytes, lasting_bytes, rank_states
from gpipe_hpc.planning.memory.by_rank import excess_bytes
from gpipe_hpc.planning.stages import count_span, count_stages
from gpipe_hpc.schedule.table.placements import looped
from tests.support import mean_square

# All alike, so that what moves, moves for want of memory.
LAYERS = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
ASKED = Request(stages=3, microbatches=6, partition="time", schedule="one_f_one_b")


def counted(layers=LAYERS):
    batch = torch.empty(16, 32, device="meta")
    example = Example(batch, batch, mean_square, 0, device_to_come("cpu"))
    return Counted(normalise_layers(layers), example)


GAUGE = counted()


def held(layout, request):
    return held_bytes(
        GAUGE.count,
        layout.partition.counts,
        layout.schedule,
        request.kept_states,
        layout.recomputed,
    )


def slowest(costs, counts):
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return max(sum(costs[a:b]) for a, b in pairwise(ends))


@given(
    st.lists(st.sampled_from([1, 2, 5]), min_size=4, max_size=9),
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.lists(st.sampled_from([1, 2, 0.5]), min_size=4, max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_no_cut_that_fits_is_faster(costs, most, paces):
    """Against all cuts; a stage fits here with at most so many layers."""
    stages = len(most)
    paces = paces[:stages]
    cuts = [
        [b - a for a, b in pairwise((0, *ends, len(costs)))]
        for ends in combinations(range(1, len(costs)), stages - 1)
    ]
    fitting = [cut for cut in cuts if all(n <= limit for n, limit in zip(cut, most, strict=True))]
    if not cuts:
        return

    def took(cut):
        ends = [sum(cut[:k]) for k in range(stages + 1)]
        pairs = zip(pairwise(ends), paces, strict=True)
        return max(sum(costs[a:b]) * pace for (a, b), pace in pairs)

    found = cut_where(costs, paces, lambda stage, start, end: end - start <= most[stage])
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting and took(found) == min(map(took, fitting))


def test_a_span_is_counted_as_the_stage_that_it_would_be():
    for counts in ([4, 5, 3], [1, 10, 1], [12]):
        starts = [sum(counts[:k]) for k in range(len(counts))]
        whole = count_stages(GAUGE.count, counts)
        place = looped(len(counts), 1, 2)
        for rank, (start, count, stage) in enumerate(zip(starts, counts, whole, strict=True)):
            span = count_span(GAUGE.count, start, start + count)
            assert span == stage
            states = rank_states(GAUGE.count, whole, place, rank, 2).lasting_bytes
            assert lasting_bytes(GAUGE.count, span.layers, 2) == states


@pytest.mark.parametrize(
    ("recompute", "small"), [("never", 0), ("always", 2), ("except_last", 0), ("budget", 2)]
)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1", "auto"])
def test_layers_move_from_a_rank_that_lacks_memory(schedule, recompute, small):
    """The cut was by time alone: `plan` said NO, and a budget that nothing fits."""
    options = {"trials": 0} if schedule == "auto" else {}
    asked = replace(ASKED, schedule=schedule, recompute=recompute, schedule_options=options)
    thrifty = asked
    if schedule == "auto":
        thrifty = replace(thrifty, schedule="one_f_one_b", schedule_options={})
    if recompute == "budget":
        thrifty = replace(thrifty, recompute="always")
    even = lay_out(thrifty, GAUGE)
    limits = [4 * each for each in held(even, asked)]
    limits[small] = round(0.8 * limits[small] / 4)
    within = replace(asked, memory_bytes=limits)
    found = lay_out(within, GAUGE)
    assert excess_bytes(held(found, within), limits) == 0
    if schedule != "auto":  # which may find an order that keeps less
        assert found.partition.counts[small] < even.partition.counts[small]
    times = even.partition.costs
    other = slowest(times, found.partition.counts)
    assert other <= 1.5 * slowest(times, even.partition.counts)
    # What was found is asked for again, as by a resumed run.
    again = lay_out(replace(within, partition=found.partition), GAUGE)
    assert again.partition.counts == found.partition.counts


def test_a_cut_that_fits_stays_and_where_none_fits_the_fastest_does():
    even = lay_out(ASKED, GAUGE)
    ample = replace(ASKED, memory_bytes=[max(held(even, ASKED))] * 3)
    assert lay_out(ample, GAUGE).partition == even.partition
    hopeless = replace(ASKED, memory_bytes=[1000, 1e9, 1e9])
    assert lay_out(hopeless, GAUGE).partition == even.partition
    with pytest.raises(PartitionError, match="nothing fits"):
        lay_out(replace(hopeless, recompute="budget"), GAUGE)


def test_a_cut_by_hand_stays_and_layers_that_cannot_be_counted_are_cut_by_time():
    by_hand = replace(ASKED, partition=[2, 8, 2], memory_bytes=[1e9, 1000, 1e9])
    assert lay_out(by_hand, GAUGE).partition.counts == (2, 8, 2)
    blind = Counted(GAUGE.layers, None)
    uniform = replace(ASKED, partition="uniform", memory_bytes=1000)
    assert lay_out(uniform, blind).partition.counts == (4, 4, 4)
