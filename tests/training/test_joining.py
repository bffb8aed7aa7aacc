"""What a process does with its memory before it runs layers, in a run or to time them."""

import pytest

from gpipe_hpc.comm.device import HostDevice
from gpipe_hpc.config import compose_config
from gpipe_hpc.plan import make_plan
from gpipe_hpc.training import joining
from gpipe_hpc.training.search.from_settings import seconds_of_layers


@pytest.mark.parametrize(("words", "times"), [((), 1), (("train.keep_freed_memory=false",), 0)])
def test_layers_are_timed_with_memory_kept_as_in_a_run(tiny, monkeypatch, words, times):
    calls: list[None] = []
    monkeypatch.setattr(joining, "keep_freed_memory", lambda: calls.append(None))
    config = compose_config([*tiny, *words, "pipeline.stages=2", "plan.costs=measured"])
    make_plan(config)
    assert len(calls) == times
    seconds_of_layers(config, HostDevice(), 1)
    assert len(calls) == 2 * times


def test_a_plan_that_counts_leaves_the_memory_as_it_is(tiny, monkeypatch):
    monkeypatch.setattr(joining, "keep_freed_memory", lambda: pytest.fail("nothing is run"))
    make_plan(compose_config([*tiny, "pipeline.stages=2"]))
