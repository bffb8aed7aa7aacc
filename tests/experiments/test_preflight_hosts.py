"""A preflight of two hosts: the link between them is measured, and a blocked pair is named."""

import re

import pytest

from experiments.two_hosts import start_ranks
from gpipe_hpc.planner.cluster_file import read_cluster
from gpipe_hpc.planner.costs.prices import read_prices
from tests.support import patience

pytestmark = [pytest.mark.two_hosts, pytest.mark.timeout(600)]

WORDS = ("-m", "gpipe_hpc.preflight", "data=synthetic", "comm.shared_memory=false")


def start_looking(pair, tmp_path, *words):
    """Start two ranks on each host."""
    command = [*WORDS, *words, f"run.dir={tmp_path}/run", f"preflight.out={tmp_path}/links.yaml"]
    places = ((0, 1), (2, 3))
    return start_ranks(pair, places, command, folder=tmp_path, logs=tmp_path / "logs")


def looked_at(pair, tmp_path, *words):
    """Let two ranks on each host look; return them, ended, within half a minute of their start."""
    ranks = start_looking(pair, tmp_path, *words)
    return ranks.wait(30.0 * patience()), ranks.outputs


def test_links_say_what_was_shaped(two_hosts, tmp_path):
    """Namespaces of one machine would share memory: hosts do not."""
    pair = two_hosts(rate=20e6, delay_s=0.02)
    codes, outputs = looked_at(pair, tmp_path, "pipeline.stages=4")
    assert codes == [0] * 4, outputs
    assert "boundaries between hosts" in outputs[0]
    found = read_cluster(tmp_path / "links.yaml")
    assert found.hosts == (2, 2)
    assert found.between.latency == pytest.approx(0.02, rel=0.25)
    assert found.between.bandwidth == pytest.approx(20e6 / 8, rel=0.25)
    assert found.within.latency < found.between.latency / 10


def test_a_short_run_over_both_hosts_tells_what_a_step_takes_beside_layers(two_hosts, tmp_path):
    pair = two_hosts(rate=200e6, delay_s=0.002)
    ranks = start_looking(pair, tmp_path, "pipeline.stages=4", "preflight.steps=true")
    assert ranks.wait(90.0 * patience()) == [0] * 4, ranks.outputs
    found = read_prices(tmp_path / "prices.yaml")
    assert found.step_s > 2 * 0.002, "ranks of both hosts meet at a step's edge"
    assert 0 < found.action_s < found.step_s
    assert "each step" in ranks.outputs[0]
    assert not (tmp_path / "run").exists()


def test_a_pair_that_is_blocked_is_named_on_every_rank(two_hosts, tmp_path):
    pair = two_hosts(rate=0.0, delay_s=0.001)
    pair.link.block(32768, 60999)
    codes, outputs = looked_at(pair, tmp_path, "pipeline.stages=2", "pipeline.replicas=2")
    assert codes == [1] * 4, outputs
    for output in outputs:
        assert re.search(
            r"rank [23] on host2 \(10.77.0.2\) cannot reach rank [01] on host1", output
        )
        assert "comm.interface" in output and "Traceback" not in output


@pytest.mark.parametrize("passed_bytes", [1, 1_000_000], ids=["as they meet", "as they time"])
def test_a_link_that_is_cut_ends_all_ranks_and_each_names_the_other_host(
    two_hosts, tmp_path, until, passed_bytes
):
    """A store's client waited for a quarter of an hour for the answer that never came."""
    pair = two_hosts(rate=20e6, delay_s=0.02)
    ranks = start_looking(pair, tmp_path, "pipeline.stages=4")
    until(lambda: pair.link.counts().back.passed_bytes >= passed_bytes, 200, "they are in touch")
    pair.link.cut()
    codes = ranks.wait(30.0 * patience())
    assert codes == [1] * 4, ranks.outputs
    for rank, output in enumerate(ranks.outputs):
        (words,) = [line for line in output.splitlines() if line.startswith("gpipe_hpc: ")]
        assert "Traceback" not in output
        if passed_bytes > 1:
            others, host = ((2, 3), "host2") if rank < 2 else ((0, 1), "host1")
            assert any(f"rank {other} on {host}" in words for other in others), words
        elif rank < 2:
            assert "ranks 2-3" in words or "rank 2" in words or "other 3 ranks" in words, words
        else:
            assert f"rank {rank}" in words and "10.77.0.1:29500" in words, words
