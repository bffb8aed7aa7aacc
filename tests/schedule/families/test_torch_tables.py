"""torch.distributed.pipelining as an oracle: its own tables loaded into ours."""

import csv
import io

import pytest
from torch.distributed.pipelining import schedules as theirs

from gpipe_hpc.schedule import (
    Costs,
    ScheduleError,
    build,
    check,
    from_text,
    lower,
    simulate,
    to_text,
)
from tests.support import refusal

ONE_EACH = Costs(forward=1, input_gradient=1, weight_gradient=1)


def torch_table(kind, ranks, microbatches, stages_per_rank):
    """Return the text of torch's own table; its functions need no more of it than a few numbers."""
    schedule = object.__new__(kind)
    schedule.pp_group_size = ranks
    schedule._n_microbatches = microbatches
    schedule._num_stages = schedule.num_stages = ranks * stages_per_rank
    schedule.n_local_stages = stages_per_rank
    schedule._stages = [None] * stages_per_rank
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    rows = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return "".join(",".join(map(cell, row)) + "\n" for row in rows)


def cell(action):
    """Return the text of one of torch's cells, as torch dumps it."""
    return "" if action is None else str(action)


def rounds_divide(ranks, microbatches):
    return microbatches % max(1, microbatches // ranks) == 0


SIZES = [(k, m) for k in (1, 2, 3, 4) for m in (1, 2, 3, 4, 6, 8, 9, 12)]


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_looped_bfs_is_torchs(stages_per_rank):
    for k, m in SIZES:
        read = from_text(torch_table(theirs.ScheduleLoopedBFS, k, m, stages_per_rank))
        ours = build("looped_bfs", ranks=k, microbatches=m, stages_per_rank=stages_per_rank)
        assert read.ranks == ours.ranks
        assert read.placement == ours.placement


@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_interleaved_is_torchs_wherever_torch_has_it(stages_per_rank):
    for k, m in SIZES:
        if rounds_divide(k, m):
            read = from_text(torch_table(theirs.ScheduleInterleaved1F1B, k, m, stages_per_rank))
            ours = build("interleaved", ranks=k, microbatches=m, stages_per_rank=stages_per_rank)
            assert read.ranks == ours.ranks


def test_zb_v_is_torchs():
    for k, m in SIZES:
        read = from_text(torch_table(theirs.ScheduleZBVZeroBubble, k, m, 2))
        ours = build("zb_v", ranks=k, microbatches=m)
        assert (read.ranks, read.placement) == (ours.ranks, ours.placement)


def test_dualpipe_v_is_torchs_where_torch_has_it():
    for k, m in SIZES:
        if m >= 2 * k:
            read = from_text(torch_table(theirs.ScheduleDualPipeV, k, m, 2))
            ours = build("dualpipe_v", ranks=k, microbatches=m)
            assert (read.ranks, read.placement) == (ours.ranks, ours.placement)
            assert sorted(read.overlaps) == sorted(ours.overlaps)


@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_torchs_interleaved_zero_bubble_loads_is_checked_and_beats_interleaved(stages_per_rank):
    """A schedule that we have no function for: written by torch, proved and run by us."""
    kind = theirs.ScheduleInterleavedZeroBubble
    for k, m in SIZES:
        if not rounds_divide(k, m):
            continue
        read = from_text(torch_table(kind, k, m, stages_per_rank), name="theirs")
        try:
            check(read)
        except ScheduleError as error:
            raise AssertionError((k, m, str(error))) from error
        check(lower(read))
        plain = build("interleaved", ranks=k, microbatches=m, stages_per_rank=stages_per_rank)
        assert simulate(read, ONE_EACH).makespan <= simulate(plain, ONE_EACH).makespan


def test_torch_reads_every_bare_table(variant):
    """Its own validator accepts ours where it knows the ops and the placement."""
    name, options = variant
    bare = build(name, ranks=4, microbatches=8, **options)
    rows = csv.reader(io.StringIO(to_text(bare)))
    actions = {
        rank: [theirs._Action.from_str(text) for text in row] for rank, row in enumerate(rows)
    }
    flat = [
        [part for action in row for part in action.sub_actions or (action,)]
        for row in actions.values()
    ]
    assert [list(map(str, row)) for row in flat] == [list(map(str, row)) for row in bare.ranks]
    if len(bare.placement.routes) == 1:
        placed = theirs._validate_schedule(actions, 4, bare.num_stages, 8)
        route = bare.placement.routes[0]
        assert placed == dict(enumerate(route))


def test_torchs_own_lowering_of_our_tables_is_proved_too(variant):
    """Its sends and receives, with our reductions behind them, pass our checker as they are."""
    name, options = variant
    bare = build(name, ranks=4, microbatches=8, **options)
    if len(bare.placement.routes) > 1:
        assert name in ("gems", "chimera", "dualpipe", "rerouted"), "torch places a stage once"
        return
    actions = {
        rank: [theirs._Action.from_str(text) for text in row]
        for rank, row in enumerate(csv.reader(io.StringIO(to_text(bare))))
    }
    route = bare.placement.routes[0]
    lowered = theirs._add_send_recv(actions, route.__getitem__, bare.num_stages)
    text = ""
    for rank in sorted(lowered):
        ends = [f"{stage}REDUCE_GRAD" for stage in bare.placement.stages_of(rank)]
        text += ",".join([*map(str, lowered[rank]), *ends]) + "\n"
    assert refusal(check, from_text(text)) is None
