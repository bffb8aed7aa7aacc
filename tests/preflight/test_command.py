"""`python -m gpipe_hpc.preflight`, as a user starts it."""

import pytest

from gpipe_hpc.planner.cluster_file import read_cluster
from tests.support import free_port

TINY = ("model.num_layers=4", "model.width=16", "model.num_heads=2", "data=synthetic")
MODULE = "gpipe_hpc.preflight"


def test_alone_it_says_that_all_is_fine(start, tmp_path):
    done = start(*TINY, module=MODULE).wait(60)
    assert done.code == 0, done.output
    assert "preflight of 1 rank on 1 host" in done.output
    assert "\ncores of " in done.output
    assert "all fine" in done.output
    assert not (tmp_path / "runs" / "run").exists()


def test_a_mistake_ends_with_code_2(start):
    done = start(*TINY, "comm.reach_s=0", module=MODULE).wait(60)
    assert done.code == 2, done.output
    assert "bad comm.reach_s, expected more than 0" in done.output


@pytest.mark.slow
def test_four_processes_write_their_links_and_an_unfit_run_ends_with_3(start_ranks, tmp_path):
    layout = ("pipeline.stages=2", "pipeline.replicas=2")
    ranks = start_ranks(4, *TINY, *layout, module=MODULE).wait(60)
    assert ranks.codes == [0] * 4, ranks.outputs
    assert "boundaries within a host" in ranks.outputs[0]
    assert read_cluster(tmp_path / "links.yaml").num_ranks == 4
    assert list((tmp_path / "runs").iterdir()) == []
    ranks = start_ranks(2, *TINY, "model.width=400000", module=MODULE).wait(60)
    assert ranks.codes == [3, 0], ranks.outputs
    assert "not fit: memory of" in ranks.outputs[0]


def test_a_rank_that_does_not_come_is_named_with_the_limit_that_is_in_force(start):
    """comm.timeout_s was to be raised, which changes nothing: a preflight waits for less."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = start(*TINY, "comm.reach_s=1", module=MODULE, env=env).wait(60)
    assert done.code == 1, done.output
    assert "missing rank 1" in done.output and "or raise comm.reach_s" in done.output
