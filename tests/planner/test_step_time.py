"""A step's seconds: one function for a plan, a search and a run; its parts."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from gpipe_hpc.config import compose_config
from gpipe_hpc.device.device import planned_device
from gpipe_hpc.device.host.machine import processor_name
from gpipe_hpc.models import normalise_layers
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planner import CountedCosts, Example, Request, lay_out
from gpipe_hpc.planner.costs.prices import PassCost, Prices, PricesContext, write_prices
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.search.cache import SearchCache
from gpipe_hpc.planner.search.candidates import Candidate
from gpipe_hpc.planner.search.machine import Machine
from gpipe_hpc.planner.search.trial import CombiningChoices, try_out
from gpipe_hpc.planner.search.whole_step import step_of
from gpipe_hpc.planner.step_time import Oversubscription
from gpipe_hpc.schedule import Cluster, Link
from gpipe_hpc.settings import Outer
from gpipe_hpc.trainer.measuring import rank_emulation
from tests.support import mean_square

SOME = Prices(
    1e-4, Link(2e-5, 3e9), Link(4e-5, 1e9),
    PassCost(1e-5, 2e-6, 3e-10), PassCost(1e-6, 2e-6, 1e-10), 5e-4,
    PricesContext("cpu", "some processor", 4, "float32", "adamw"),
)  # fmt: skip
BATCH = 16


def layers():
    return normalise_layers([each for _ in range(4) for each in (nn.Linear(64, 64), nn.ReLU())])


def counted(samples):
    inputs = torch.empty(samples, 64, device="meta")
    return CountedCosts(layers(), Example(inputs, inputs, mean_square, 0, planned_device("cpu")))


def machine_of(ranks=4, **more):
    return Machine(
        Cluster((ranks,), Link(1e-5, 1e9), Link()), Rates.alike(1e9), 1e-5, prices=SOME, **more
    )


@pytest.mark.parametrize(
    "schedule, replicas, recompute, offload",
    [
        ("gpipe", 2, "except_last", False),
        ("one_f_one_b", 1, "never", False),
        ("zb_h1", 2, "never", False),
        ("gpipe", 1, "never", True),
        ("gpipe", 2, "except_last", True),
    ],
)
def test_a_plan_and_a_search_tell_the_same_seconds(schedule, replicas, recompute, offload):
    """They were told by different functions, of which each knew what the other left out."""
    request = Request(partition="time", outer=Outer(bucket_bytes=20e3))
    machine = machine_of(clips=True, host_bytes_per_s=1e7)
    cache = SearchCache(machine, layers(), counted, BATCH)
    microbatches = 8 if offload else 4
    candidate = Candidate(
        replicas, 4 // replicas, microbatches, schedule, (), recompute, offload=offload
    )
    ways = CombiningChoices(("none",), ("none",), (20e3,))
    trial = try_out(candidate, cache, request, ways)
    cost_model = machine.priced(counted(candidate.samples(BATCH)))
    layout = lay_out(trial.request, cost_model)
    step = step_of(layout, cost_model, machine, trial.request.combining, BATCH)
    assert step.total_s == pytest.approx(trial.step_s, rel=1e-9)
    assert step.norm_s > 0 and step.optimizer_s > 0 and step.overhead_s == SOME.step_s
    assert (step.reduction_s > 0) == (replicas > 1)
    quick = replace(machine, host_bytes_per_s=None)
    without = step_of(layout, cost_model, quick, trial.request.combining, BATCH)
    # Boundaries, all that is kept of what is recomputed, are copied beside the compute.
    assert (without.total_s < 0.99 * step.total_s) == (offload and recompute == "never")
    free = replace(machine, prices=Prices(), clips=False)
    assert step_of(layout, cost_model, free, Outer(bucket_bytes=20e3), BATCH).total_s < step.total_s


def test_ranks_that_share_cores_are_named():
    cost_model = machine_of().priced(counted(4))
    layout = lay_out(Request(stages=4, microbatches=4, partition="time"), cost_model)
    alone = step_of(layout, cost_model, machine_of(cores=4), Outer(), BATCH)
    shared = step_of(layout, cost_model, machine_of(cores=1), Outer(), BATCH)
    assert alone.crowd is None and shared.crowd == Oversubscription(4, 1)
    assert "4 ranks share 1 core of their host" in shared.text()
    busy = sum(shared.timeline.busy)
    assert shared.pipeline_s >= busy * (1 - 1e-9) and shared.total_s > alone.total_s


def test_plan_tells_the_parts_of_a_step(tmp_path):
    here = SOME.measured._replace(name=processor_name())
    write_prices(tmp_path / "prices.yaml", replace(SOME, measured=here))
    words = ["model=mlp", "data=synthetic_vectors", "pipeline.stages=2", "plan.flops_per_s=1e9"]
    text = make_plan(compose_config([*words, f"plan.prices={tmp_path}/prices.yaml"])).text
    line = next(each for each in text.splitlines() if "expected step time" in each)
    assert "pipeline" in line and "optimizer" in line and "overhead 0.0005" in line


def test_plan_measures_layers_where_asked(monkeypatch):
    monkeypatch.setattr(rank_emulation, "load_generators", lambda *_: nullcontext())
    words = ["model=mlp", "data=synthetic_vectors", "pipeline.stages=2", "plan.costs=measured"]
    text = make_plan(compose_config(words)).text
    assert "at layers measured here" in text and "by time, measured here" in text
