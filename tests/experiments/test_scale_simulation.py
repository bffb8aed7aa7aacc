"""The simulation of experiments/scale: its rows on a small cluster and a small model."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.scale.simulation.__main__ import HERE, table_of
from experiments.scale.simulation.jobs import DEEPER, WIDER, simulated
from experiments.scale.simulation.model import Work
from gpipe_hpc.planner.cluster_file import read_cluster
from gpipe_hpc.schedule import Cluster, Costs, Link

ROOT = Path(__file__).parents[2]
EVEN = Cluster((3,) * 4, Link(0.1, 100), Link(0.5, 10))
SLOW = replace(EVEN, paces={5: 1.5, 11: 2.0}, host_links={1: Link(1, 3)})


def work(num_stages):
    return Work(
        Costs(forward=1, input_gradient=1, weight_gradient=1, boundary_bytes=2),
        [30.0 + stage for stage in range(num_stages)],
        dict.fromkeys(range(num_stages), 2),
    )


@pytest.mark.parametrize(("schedule", "stages"), [("one_f_one_b", 4), ("zb_v", 8)])
def test_a_row_is_held_against_all_ranks_event_by_event(schedule, stages):
    """Both ways run for so few ranks, and `simulated` asserts that they agree to the last bit."""
    even, slow = (
        simulated("wider", schedule, named, (4, 3), work(stages))
        for named in (("even", EVEN), ("described", SLOW))
    )
    assert even.together_cpu_s is not None
    assert (even.ranks, even.replicas, even.different_replicas) == (12, 3, 3)
    assert slow.step_s > even.step_s and slow.bubble > even.bubble
    assert slow.slowest_replica == 2
    assert 0 < even.reduction_share < 1
    text = table_of([even, slow])
    assert "| 4 x 3 |" in text and f"| {slow.step_s:.2f} |" in text


def test_the_described_cluster_has_the_ranks_that_are_simulated():
    cluster = read_cluster(HERE / "cluster.yaml")
    assert cluster.num_ranks == 10_000
    assert max(ranks * replicas for ranks, replicas in (*WIDER, *DEEPER)) == 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_writes_rows_and_table(tmp_path):
    command = [sys.executable, "-m", "experiments.scale.simulation", "--most-ranks", "10"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=True, timeout=280)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 12 and all(row["step_s"] > 1 for row in rows)
    assert (tmp_path / "table.md").read_text().count("\n") == 8
