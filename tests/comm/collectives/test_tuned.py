"""A link measured by the ranks themselves, and the algorithms it speaks for."""

import pytest
import torch

from gpipe_hpc.comm.collectives.costs import Link
from gpipe_hpc.comm.collectives.tuned import (
    measured_link,
    start_tuned_all_reduce,
    start_tuned_broadcast,
)
from gpipe_hpc.comm.collectives.tuning import choose
from gpipe_hpc.comm.group import SoloGroup
from gpipe_hpc.comm.joining.start import start_world
from gpipe_hpc.comm.threads import run_on_threads

SLOW, WIDE = Link(1e-3, 1e-12), Link(1e-9, 1e-6)


@pytest.mark.parametrize("link", [SLOW, WIDE])
def test_what_is_chosen_sums_and_brings_the_roots_values(link):
    # Else both links are the same to the tuner, and one algorithm alone is tried.
    assert choose("all_reduce", SLOW, 4, 800) != choose("all_reduce", WIDE, 4, 800)

    def body(world):
        own, other = torch.full((100,), float(world.rank)), torch.full((100,), float(world.rank))
        start_tuned_all_reduce(world.everybody, own, link).wait()
        start_tuned_broadcast(world.everybody, other, 3, link).wait()
        return own.unique().tolist(), other.unique().tolist()

    assert run_on_threads(4, body) == [([6.0], [3.0])] * 4


def test_all_ranks_measure_one_link(processes, tmp_path):
    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        found = measured_link(world.everybody, sizes=(64, 40_000), repeats=2)
        own = torch.ones(5000) * rank
        start_tuned_all_reduce(world.everybody, own, found.link).wait()
        return tuple(found.link), own.unique().tolist()

    one, other = processes(2, body, tmp_path)
    assert one == other and one[1] == [1.0]
    assert min(one[0]) >= 0 and max(one[0]) > 0


def test_a_rank_alone_has_no_link():
    assert measured_link(SoloGroup(0)).link == Link(0.0, 0.0)
    start_tuned_all_reduce(SoloGroup(0), torch.ones(2), Link(0.0, 0.0)).wait()
