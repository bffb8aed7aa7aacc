"""The table is made on rank 0; every other rank gets its own row of it, and no more."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.collectives.tree_group import TreeGroup, own_tree_levels
from gpipe_hpc.comm.net.pickling import dumps, loads
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.planner import Layout, broadcast_layout
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.tables import make_tables
from gpipe_hpc.schedule import Op, build, digest, with_row, without_rows
from gpipe_hpc.schedule.families.known import FAMILIES
from gpipe_hpc.settings import MicrobatchSplit


def layout_of(ranks=4, microbatches=6, replicas=1, name="zb_v"):
    table = build(name, ranks=ranks, microbatches=microbatches)
    partition = Partition((1,) * table.num_stages, (1.0,) * table.num_stages, "layers")
    portions = MicrobatchSplit(((replicas, microbatches),))
    return Layout(partition, make_tables(table, "always"), portions=portions)


def handed_out(world, layout, replicas, width=2):
    """Hand out over groups in levels, as processes do."""

    def levels(ranks):
        position = ranks.index(world.rank)
        groups = [
            world.group([[ranks[i] for i in level]])
            for level in own_tree_levels(len(ranks), position, width)
        ]
        return TreeGroup(ranks, position, groups, width)

    mesh = Mesh(replicas, world.size // replicas)
    everybody = levels(list(range(world.size)))
    pipeline = levels(list(mesh.pipeline_ranks(mesh.replica_of(world.rank))))
    decided = layout if world.rank == 0 else None
    dp_group = levels(list(mesh.replica_ranks(mesh.stage_rank_of(world.rank))))
    return broadcast_layout(decided, world.rank, mesh, everybody, pipeline, dp_group)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (5, 1), (4, 3), (1, 3)])
def test_each_rank_has_its_row_and_the_digest_of_the_whole(ranks, replicas):
    layout = layout_of(ranks, replicas=replicas)
    found = run_on_threads(ranks * replicas, lambda world: handed_out(world, layout, replicas))
    assert found[0] is layout
    for number, own in enumerate(found):
        rank = number % ranks
        assert own.digest() == layout.digest()
        for mine, whole in zip(own.tables.schedules, layout.tables.schedules, strict=True):
            assert mine.ranks[rank] == whole.ranks[rank]
            assert digest(mine) == digest(whole)
            if number:
                others = [row for at, row in enumerate(mine.ranks) if at != rank]
                assert all(not hasattr(row, "which") for row in others), "rows of others"


def test_the_row_of_another_rank_is_refused_by_name():
    table = without_rows(layout_of().schedule)
    for look in (list, lambda row: row[0]):
        with pytest.raises(ScheduleError, match=r"actions of rank 2 are not available.* rank 0"):
            look(table.ranks[2])
    with pytest.raises(ScheduleError, match="actions of rank 0 are not available"):
        _ = table.rows


def test_a_row_that_is_not_the_one_made_is_refused():
    """A rank that went on with it would wait for messages that nobody sends."""
    whole = layout_of().schedule
    table = without_rows(whole)
    right = whole.rows[1]
    with_row(table, 1, right)
    spoilt = list(right)
    spoilt[3], spoilt[4] = spoilt[4], spoilt[3]
    wrong = replace(whole, ranks=(whole.ranks[0], tuple(spoilt), *whole.ranks[2:])).rows[1]
    for row in (whole.rows[0], wrong, wrong.only(lambda kind: kind[0] is not Op.F)):
        with pytest.raises(
            ScheduleError, match=r"rank 1: received a row .* rank 0 built \d+ actions"
        ):
            with_row(table, 1, row)


def test_what_a_rank_is_sent_grows_with_its_row_alone():
    """Each rank built, pickled and kept the whole table: 2.4 GB for 512 ranks."""
    sizes = {}
    for ranks, microbatches in ((8, 16), (32, 16), (32, 64)):
        layout = layout_of(ranks, microbatches)
        rows = [len(dumps(layout.rows(rank), "rows")) for rank in range(ranks)]
        num_actions = [sum(map(len, layout.rows(rank))) for rank in range(ranks)]
        # Two columns of four bytes an action, and the kinds of action that the rank has.
        assert all(size < 8 * n + 4000 for size, n in zip(rows, num_actions, strict=True))
        sizes[ranks, microbatches] = max(rows), len(dumps(layout.without_rows(), "layout"))
    assert sizes[32, 16][0] < 1.1 * sizes[8, 16][0] + 200, "more ranks, the same row"
    # The digests of rows and the placement, of a few bytes a rank and micro-batch.
    assert sizes[32, 64][1] < 32 * 600 + 64 * 20 + 4000


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_come_back_from_their_bytes(name):
    table = build(name, ranks=4, microbatches=8, recompute="always")
    for row in (*table.rows, *make_tables(table, "always").training.rows):
        again = loads(dumps(row, "row"), "row")
        assert again == row and list(again) == list(row) and again.digest() == row.digest()


def test_ranks_that_hold_their_own_row_train_alike():
    """Nothing in a step looks at the row of another rank."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 4, dtype=torch.float64)
    layers = [LayerSpec(nn.Linear, 4, 4, dtype=torch.float64) for _ in range(8)]

    def body(world):
        pipe = Pipeline(
            layers,
            nn.functional.mse_loss,
            stages=4,
            microbatches=4,
            schedule="interleaved",
            world=world,
        )
        result = pipe.step(inputs[pipe.share(8)], inputs[pipe.share(8)])
        pipe.evaluate(inputs[pipe.share(8)], inputs[pipe.share(8)])
        if world.rank:
            with pytest.raises(ScheduleError, match="actions of rank"):
                list(pipe.schedule.ranks[world.rank - 1])
        return float(result.loss), pipe.schedule.num_actions, digest(pipe.schedule)

    assert len(set(run_on_threads(4, body))) == 1
