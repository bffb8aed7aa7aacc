"""The mesh is arithmetic: world rank = replica x stages + stage_rank."""

import pytest

from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.errors import ConfigError


def test_world_rank_is_replica_times_stages_plus_stage_rank():
    mesh = Mesh(replicas=2, stages=3)
    assert mesh.size == 6
    for rank in range(mesh.size):
        assert divmod(rank, 3) == (mesh.replica_of(rank), mesh.stage_rank_of(rank))
        assert mesh.world_rank(mesh.replica_of(rank), mesh.stage_rank_of(rank)) == rank


def test_groups_cover_the_world_along_each_axis():
    mesh = Mesh(replicas=2, stages=3)
    assert [mesh.pipeline_ranks(replica) for replica in range(2)] == [(0, 1, 2), (3, 4, 5)]
    assert [mesh.replica_ranks(stage) for stage in range(3)] == [(0, 3), (1, 4), (2, 5)]


def test_stages_default_to_what_replicas_leave():
    assert Mesh.fit(6, None, 2) == Mesh(replicas=2, stages=3)
    assert Mesh.fit(1, None, 1) == Mesh(replicas=1, stages=1)


@pytest.mark.parametrize(
    ("world_size", "stages", "replicas", "words"),
    [
        (6, 4, 1, "4 x 1 = 4 with 6 rank"),
        (4, 4, 2, "start 8 ranks"),
        (5, None, 2, "2 x 2 = 4 with 5 rank"),
        (5, 2, 2, "as pipeline.replicas=1 for 3 pipelines, the last with fewer ranks"),
        (6, 2, 2, "as pipeline.replicas=3;"),
        (1, None, 2, "1 x 2 = 2 with 1 rank"),
        (4, 0, 1, "stages=0"),
        (4, 4, 0, "replicas=0"),
        (4, -2, -2, "stages=-2"),
    ],
)
def test_what_does_not_fill_the_world_is_refused(world_size, stages, replicas, words):
    with pytest.raises(ConfigError, match=words):
        Mesh.fit(world_size, stages, replicas)
