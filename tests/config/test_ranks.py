"""The replicas of a run: as many as its ranks make, where none are told."""

import json

import pytest

from gpipe_hpc.config import check_config, compose_config, num_planned_ranks, on_ranks
from gpipe_hpc.errors import ConfigError
from tests.support import train_here


@pytest.mark.parametrize(
    ("ranks", "words", "stages", "replicas", "microbatches"),
    [
        (8, ["pipeline.stages=4"], 4, 2, 8),
        (12, ["pipeline.stages=4"], 4, 3, 8),
        (4, ["pipeline.stages=4"], 4, 1, 8),
        (7, ["pipeline.stages=4"], 7, 1, 16),  # one table, with a hole
        (8, ["pipeline.stages=1"], 1, 8, 8),
        (8, [], None, 1, 8),
        (8, ["pipeline.replicas=2"], None, 2, 8),
        (8, ["pipeline.stages=fit"], "fit", 1, 8),
        (4, ["pipeline.stages=4", "pipeline.replicas=2"], 4, 1, 16),
    ],
)
def test_replicas_are_as_many_as_the_ranks_make(ranks, words, stages, replicas, microbatches):
    config = compose_config(words)
    check_config(config, ranks)
    found = on_ranks(config, ranks).pipeline
    assert (found.stages, found.replicas, found.microbatches) == (stages, replicas, microbatches)


@pytest.mark.parametrize("ranks", [3, 8])
def test_what_is_told_is_not_changed(ranks):
    """Three ranks are too few for four stages, and one pipeline of four leaves four ranks over."""
    words = ["pipeline.stages=4", *["pipeline.replicas=1"] * (ranks == 8)]
    with pytest.raises(ConfigError, match=r"expected stages x replicas = world size, got 4 x 1"):
        check_config(compose_config(words), ranks)


def test_ranks_to_come_make_replicas_too():
    """For commands that start none, as plan and draw."""
    config = compose_config(["pipeline.stages=4", "pipeline.ranks=8"])
    assert (config.pipeline.num_replicas, num_planned_ranks(config, 2)) == (2, 8)
    config = compose_config(["pipeline.stages=4"])
    assert (config.pipeline.num_replicas, num_planned_ranks(config, 2)) == (1, 4)


def test_a_run_takes_the_ranks_that_come_and_goes_on_with_others(tiny, tmp_path):
    """Four ranks, then two: the settings keep that none were told, the summary says how many."""
    words = [*tiny, "train.steps=4", "pipeline.stages=2", f"run.dir={tmp_path}/run"]
    for ranks, last in ((4, 2), (2, 4)):
        train_here(ranks, *words, f"train.stop_at={last}")
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["layout"]["replicas"] == ranks // 2
        assert "replicas: null" in (tmp_path / "run" / "config.yaml").read_text()
