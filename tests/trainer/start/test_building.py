"""Every setting of the pipeline reaches the `Pipeline` that trains."""

from inspect import signature
from types import SimpleNamespace

import pytest
import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.config import build_target, compose_config
from gpipe_hpc.data.shapes import microbatch
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.device.host.machine import processor_name
from gpipe_hpc.models import loss_function
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planner import OptimizerMemory
from gpipe_hpc.planner.costs.prices import Prices, PricesContext, write_prices
from gpipe_hpc.settings import Outer
from gpipe_hpc.trainer.start import building
from tests.support import run_on_threads

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
    "optimizer=sgd": (
        "optimizer_states",
        OptimizerMemory(1, True, of_all_on_device=0),
    ),
    "pipeline.offload=true": ("offload", True),
    "pipeline.partition=uniform": ("partition", "uniform"),
    "pipeline.paces=[1,2,1]": ("paces", [1, 2, 1]),
    "pipeline.pins={0: 0, 11: 1}": ("pins", {0: 0, 11: 1}),
    "train.seed=11": ("seed", 11),
    "train.build_on=device": ("build_on", "device"),
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
        world = SimpleNamespace(device=HostDevice())
        building.build_pipeline(compose_config(list(GIVEN)), world, [], None, None, None)
    return found


def test_a_run_counts_what_a_process_takes_as_its_plan_does(tmp_path):
    """A plan recomputed a layer for what the process takes, and the run of it none."""
    prices = tmp_path / "prices.yaml"
    own = PricesContext("cpu", processor_name(), 2, "float32", "adamw")
    write_prices(prices, Prices(measured=own, process_bytes=300_000))
    words = (
        *("model=mlp", "model.widths=[64,64,64,64,64,64,64]", "data=synthetic_vectors"),
        *(
            "data.width=64",
            "train.batch_size=128",
            "pipeline.microbatches=2",
            "pipeline.partition=uniform",
        ),
        *("pipeline.stages=2", "pipeline.recompute=budget", "train.device=cpu"),
    )

    def planned(*more):
        layout = make_plan(compose_config([*words, *more])).layout
        return [sorted(own) for own in layout.recomputed or ()]

    def ran(*more):
        config = compose_config([*words, *more])
        layers, sample = build_target("model", config.model), microbatch(config.data, 64)
        loss = loss_function(sample.loss)
        given = torch.zeros(64, 64), torch.zeros(64, dtype=sample.targets.dtype)

        def body(world):
            pipe = building.build_pipeline(config, world, layers, loss, None, given)
            return [sorted(own) for own in pipe.layout.recomputed or ()]

        first, second = run_on_threads(2, body)
        assert first == second
        return first

    limit = "pipeline.memory_bytes=680e3"
    assert planned(limit) == ran(limit)
    assert planned(limit, f"plan.prices={prices}") == ran(limit, f"plan.prices={prices}")
    assert planned(limit) != planned(limit, f"plan.prices={prices}")


@pytest.mark.parametrize("setting", GIVEN)
def test_a_setting_reaches_the_pipeline(setting, keywords):
    keyword, value = GIVEN[setting]
    assert keywords[keyword] == value


def test_no_keyword_is_left_out():
    known = set(signature(Pipeline).parameters)
    assert known - ELSEWHERE == {keyword for keyword, _ in GIVEN.values()}
