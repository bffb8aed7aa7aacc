"""Step times of pipelines with missing ranks in experiments/resilience."""

import math
from pathlib import Path

from experiments.resilience.__main__ import (
    Job,
    partitioned_again,
    rerouted,
    small_table,
    whole_replicas,
)

PAGE = Path(__file__).parents[2] / "experiments" / "resilience" / "README.md"
SMALL = Job(stages=4, replicas=3, microbatches=8, ranks_per_host=1)


def test_more_room_and_a_new_partition_shorten_a_step_with_missing_hosts():
    assert whole_replicas(SMALL, 0) == rerouted(SMALL, 0, 1) == 1
    assert whole_replicas(SMALL, 1) == whole_replicas(SMALL, 4) > 1.3
    assert whole_replicas(SMALL, 9) == math.inf
    for lost in (1, 2):
        roomy, tight = rerouted(SMALL, lost, 4), rerouted(SMALL, lost, 1)
        assert 1 < roomy <= tight
        assert 1 < partitioned_again(SMALL, lost, 4) <= roomy


def test_the_page_has_the_simulated_steps_of_small_pipelines():
    assert small_table() in PAGE.read_text("utf-8")
