"""The number of replicas follows from the number of ranks if it is not set."""

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
        (7, ["pipeline.stages=4"], 7, 1, 16),  # one table, with a partial replica
        (8, ["pipeline.stages=1"], 1, 8, 8),
        (8, [], None, 1, 8),
        (8, ["pipeline.replicas=2"], None, 2, 8),
        (8, ["pipeline.stages=fit"], "fit", 1, 8),
        (4, ["pipeline.stages=4", "pipeline.replicas=2"], 4, 1, 16),
    ],
)
def test_number_of_replicas_follows_from_ranks_and_stages(
    ranks, words, stages, replicas, microbatches
):
    config = compose_config(words)
    check_config(config, ranks)
    found = on_ranks(config, ranks).pipeline
    assert (found.stages, found.replicas, found.microbatches) == (stages, replicas, microbatches)


@pytest.mark.parametrize("ranks", [3, 8])
def test_layout_that_does_not_fit_the_ranks_is_rejected(ranks):
    """Three ranks are too few for four stages; with eight, one replica leaves four unused."""
    words = ["pipeline.stages=4", *["pipeline.replicas=1"] * (ranks == 8)]
    with pytest.raises(ConfigError, match=r"expected stages x replicas = world size, got 4 x 1"):
        check_config(compose_config(words), ranks)


def test_number_of_replicas_follows_from_planned_ranks():
    """For commands that start no ranks, such as plan and draw."""
    config = compose_config(["pipeline.stages=4", "pipeline.ranks=8"])
    assert (config.pipeline.num_replicas, num_planned_ranks(config, 2)) == (2, 8)
    config = compose_config(["pipeline.stages=4"])
    assert (config.pipeline.num_replicas, num_planned_ranks(config, 2)) == (1, 4)


def test_run_resumes_on_another_number_of_ranks(tiny, tmp_path):
    """Four ranks, then two. config.yaml keeps `replicas: null`; the summary has the number."""
    words = [*tiny, "train.steps=4", "pipeline.stages=2", f"run.dir={tmp_path}/run"]
    for ranks, last in ((4, 2), (2, 4)):
        train_here(ranks, *words, f"train.stop_at={last}")
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["layout"]["replicas"] == ranks // 2
        assert "replicas: null" in (tmp_path / "run" / "config.yaml").read_text()
