"""What a step takes beside its layers is timed among ranks that meet ahead of it."""

import time
from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.config import compose_config
from gpipe_hpc.planner.costs.prices import PassCost, Prices
from gpipe_hpc.planner.step_time import Oversubscription
from gpipe_hpc.schedule import Link
from gpipe_hpc.trainer.measuring import overheads

current_rank: ContextVar[int] = ContextVar("current_rank")


def test_who_waits_for_another_rank_does_not_count_that_as_the_works(monkeypatch):
    """Sums of four bytes took milliseconds: one rank was ready before the other."""
    late_s = 0.05
    together = overheads.collective_errors

    def late(world, activity):
        time.sleep(late_s * current_rank.get())
        return together(world, activity)

    monkeypatch.setattr(overheads, "collective_errors", late)
    monkeypatch.setattr(overheads, "_REPEATS", 3)

    def body(world):
        current_rank.set(world.rank)
        bench = overheads._OverheadBench(None, world, SimpleNamespace(stages=2), 1.0)
        return bench.summing().latency

    assert max(run_on_threads(2, body)) < late_s / 4


def test_each_price_is_from_where_it_is_measured_and_crowds_slow_what_they_slow(
    tmp_path, monkeypatch
):
    ours, of_run = PassCost(0.3, 0.2, 0.1), Prices(action_s=0.01, step_s=0.4, update=PassCost(9.0))
    monkeypatch.setattr(overheads, "_crowd", lambda world: Oversubscription(4, 2))
    monkeypatch.setattr(
        overheads._OverheadBench, "passes", lambda self: (ours, PassCost(self.slowed))
    )
    monkeypatch.setattr(overheads._OverheadBench, "summing", lambda self: Link(0.5))
    monkeypatch.setattr(overheads, "prices_of_short_run", lambda *_: of_run)
    config = compose_config(["model=mlp", "data=synthetic_vectors", "optimizer=sgd"])
    (found,) = run_on_threads(
        1, lambda world: overheads.measure_prices(config, world, Mesh(1, 1), Link(0.7), tmp_path)
    )
    assert (found.update, found.norm) == (ours, PassCost(2.0))
    assert (found.send, found.summing) == (Link(0.7), Link(0.5))
    # A step is slowed by others that share its core; a plan multiplies that in again.
    assert (found.action_s, found.step_s) == (0.01, 0.2)
    assert found.measured.optimizer == "sgd" and found.process_bytes > 0


@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (2, 2), (2, 1)])
def test_sums_are_timed_among_the_ranks_of_a_host(monkeypatch, ranks, hosts):
    """Over two hosts they went at the pace of the network, and were used as those of one."""
    formed = []

    def body(world):
        found = overheads._OverheadBench(None, world, SimpleNamespace(stages=ranks), 1.0)
        monkeypatch.setattr(
            overheads, "kernel_identity", lambda: f"host {int(current_rank.get()) * hosts // ranks}"
        )
        current_rank.set(world.rank)
        groups = found._ranks_of_hosts()
        if world.rank == 0:
            formed.append(groups)
        return found.summing()

    run_on_threads(ranks, body)
    each = ranks // hosts
    assert formed == [[list(range(h * each, (h + 1) * each)) for h in range(hosts)]]
