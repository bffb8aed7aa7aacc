"""From rank 0, which has laid out, to all others: what all know, and to each rank its rows."""

from gpipe_hpc.comm.collectives.group import Gathering
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.planner.layout import Layout
from gpipe_hpc.schedule import Row


def hand_out(
    decided: Layout | None,
    rank: int,
    mesh: Mesh,
    everybody: Gathering,
    pipeline: Gathering,
    of_place: Gathering,
) -> Layout:
    """Return the layout that rank 0 has `decided` on; the same call on every rank.

    Rank 0 keeps all of it, the others have their own rows of its tables. Those of one position are
    the same in all replicas: rank 0 deals them within the first `pipeline`, each of its ranks then
    tells the same position of the others, `of_place`. Raises ScheduleError if other rows came than
    were sent.
    """
    layout: Layout = everybody.broadcast_object(decided and decided.without_rows(), root=0)
    own = mesh.stage_rank_of(rank)
    rows: list[Row] = []
    if mesh.replica_of(rank) == 0:
        dealt = None if decided is None else [decided.rows(k) for k in range(mesh.stages)]
        rows = pipeline.deal_object(dealt, root=0)
    rows = of_place.broadcast_object(rows, root=own)
    return layout.with_rows(own, rows) if decided is None else decided
