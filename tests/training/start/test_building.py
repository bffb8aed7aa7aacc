"""Every setting of the pipeline reaches the `Pipeline` that trains."""

from inspect import signature

import pytest

from gpipe_hpc import Pipeline
from gpipe_hpc.config import compose_config
from gpipe_hpc.engine.outer.settings import Outer
from gpipe_hpc.planning import OptimizerMemory
from gpipe_hpc.training.start import building

# What each keyword of `Pipeline` is when these settings are given, none of which is a default.
GIVEN = {
    "pipeline.stages=3": ("stages", 3),
    "pipeline.replicas=2": ("replicas", 2),
    "pipeline.microbatches=5": ("microbatches", 5 * 7),
    "train.accumulation=7": ("microbatches", 5 * 7),
    "pipeline.schedule=zb_h1": ("schedule", "zb_h1"),
    "+pipeline.options.limit=6": ("schedule_options", {"limit": 6}),
    "pipeline.recompute=budget": ("recompute", "budget"),
    "pipeline.memory_bytes=[1GB,2e9,3GB]": ("memory_bytes", [1e9, 2e9, 3e9]),
    "optimizer=sgd": ("optimizer_states", OptimizerMemory(1, masters=True)),
    "pipeline.offload=true": ("offload", True),
    "pipeline.partition=uniform": ("partition", "uniform"),
    "pipeline.paces=[1,2,1]": ("paces", [1, 2, 1]),
    "train.seed=11": ("seed", 11),
    "train.precision=bfloat16": ("precision", "bfloat16"),
    "pipeline.normalise_over_replicas=true": ("normalise_over_replicas", True),
    "pipeline.buffers=first": ("buffers", "first"),
    "train.compile=true": ("compile", True),
    "outer.bucket_bytes=1000": ("outer", Outer(bucket_bytes=1000)),
    "lr.scaling=adascale": ("noise_over", "microbatches"),
    "comm.timeout_s=33": ("timeout_s", 33.0),
}
# Those of the world, which is started before.
TIMES = {"silence_s", "stall_s"}
# The run binds its ranks before it builds the model, and until its end.
CORES = {"bind", "num_threads"}
ELSEWHERE = {"layers", "loss_fn", "example", "device", "world", *TIMES, *CORES}


@pytest.fixture(scope="module")
def keywords():
    """Return what `Pipeline` is called with."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "Pipeline", lambda *_, **keywords: found.update(keywords))
        building.build_pipeline(compose_config(list(GIVEN)), "world", [], None, None, None)
    return found


@pytest.mark.parametrize("setting", GIVEN)
def test_a_setting_reaches_the_pipeline(setting, keywords):
    keyword, value = GIVEN[setting]
    assert keywords[keyword] == value


def test_no_keyword_is_left_out():
    known = set(signature(Pipeline).parameters)
    assert known - ELSEWHERE == {keyword for keyword, _ in GIVEN.values()}
