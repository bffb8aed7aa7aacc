"""Send the layout from rank 0 to all ranks, with only the schedule rows that each rank runs."""

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.planner.layout import Layout
from gpipe_hpc.schedule import Row


def broadcast_layout(
    decided: Layout | None,
    rank: int,
    mesh: Mesh,
    world_group: ControlGroup,
    pipeline: ControlGroup,
    dp_group: ControlGroup,
) -> Layout:
    """Send the layout `decided` by rank 0 to all ranks and return it; collective.

    Rank 0 keeps the complete layout; every other rank gets only its own rows of the tables. Ranks
    at the same position of different replicas have the same rows: rank 0 scatters them within the
    first `pipeline`, whose ranks broadcast them to the same position of other replicas
    (`dp_group`). Raises ScheduleError if the received rows differ from the sent ones.
    """
    layout: Layout = world_group.broadcast_object(decided and decided.without_rows(), root=0)
    own = mesh.stage_rank_of(rank)
    rows: list[Row] = []
    if mesh.replica_of(rank) == 0:
        dealt = None if decided is None else [decided.rows(k) for k in range(mesh.stages)]
        rows = pipeline.scatter_object(dealt, root=0)
    rows = dp_group.broadcast_object(rows, root=own)
    return layout.with_rows(own, rows) if decided is None else decided
