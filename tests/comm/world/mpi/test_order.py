"""In which order sums over MPI add: one for each element, whatever the algorithm by size."""

import pytest
import torch

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.collectives.halving import butterfly_all_reduce, rabenseifner_all_reduce
from gpipe_hpc.comm.collectives.plan import PlanPosition

COUNT = 37


@pytest.mark.parametrize("size", range(2, 8))
def test_short_and_long_tensors_are_summed_in_one_order(size):
    """Else a tensor's bits would change with the bucket that it lies in."""

    def body(world):
        group, place = world.group([range(size)]), PlanPosition(size, world.rank)
        generator = torch.Generator().manual_seed(world.rank)
        short = torch.randn(COUNT, generator=generator) * 10**world.rank
        long = short.clone()
        group.start_plan(butterfly_all_reduce(place, COUNT), short, "short").wait()
        group.start_plan(rabenseifner_all_reduce(place, COUNT), long, "long").wait()
        return short, long

    found = run_on_threads(size, body)
    assert all(torch.equal(short, found[0][0]) for short, _ in found)
    assert all(torch.equal(long, found[0][0]) for _, long in found)
