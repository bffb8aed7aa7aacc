"""Distribute the layout from rank 0: common facts to all ranks, table rows to their rank."""

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
    """Return the layout that rank 0 has `decided` on; collective over all ranks.

    Rank 0 keeps the complete layout, others get their own rows of its tables. Ranks at the same
    position of different replicas have the same rows: rank 0 scatters them within the first
    `pipeline`, whose ranks broadcast them to the same position of other replicas (`of_place`).
    Raises ScheduleError if the received rows differ from the sent ones.
    """
    layout: Layout = everybody.broadcast_object(decided and decided.without_rows(), root=0)
    own = mesh.stage_rank_of(rank)
    rows: list[Row] = []
    if mesh.replica_of(rank) == 0:
        dealt = None if decided is None else [decided.rows(k) for k in range(mesh.stages)]
        rows = pipeline.deal_object(dealt, root=0)
    rows = of_place.broadcast_object(rows, root=own)
    return layout.with_rows(own, rows) if decided is None else decided
