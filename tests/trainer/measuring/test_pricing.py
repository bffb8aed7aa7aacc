"""What a step takes beside its layers is timed among ranks that meet ahead of it."""

import time
from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.config import compose_config
from gpipe_hpc.planner.costs.prices import Pass, Prices
from gpipe_hpc.planner.step_time import Crowd
from gpipe_hpc.schedule import Link
from gpipe_hpc.trainer.measuring import pricing

current_rank: ContextVar[int] = ContextVar("current_rank")


def test_who_waits_for_another_rank_does_not_count_that_as_the_works(monkeypatch):
    """Sums of four bytes took milliseconds: one rank was ready before the other."""
    late_s = 0.05
    together = pricing.together

    def late(world, activity):
        time.sleep(late_s * current_rank.get())
        return together(world, activity)

    monkeypatch.setattr(pricing, "together", late)
    monkeypatch.setattr(pricing, "_REPEATS", 3)

    def body(world):
        current_rank.set(world.rank)
        bench = pricing._Bench(None, world, SimpleNamespace(stages=2), 1.0)
        return bench.summing().latency

    assert max(run_on_threads(2, body)) < late_s / 4


def test_each_price_is_from_where_it_is_measured_and_crowds_slow_what_they_slow(
    tmp_path, monkeypatch
):
    ours, of_run = Pass(0.3, 0.2, 0.1), Prices(action_s=0.01, step_s=0.4, update=Pass(9.0))
    monkeypatch.setattr(pricing, "_crowd", lambda world: Crowd(4, 2))
    monkeypatch.setattr(pricing._Bench, "passes", lambda self: (ours, Pass(self.slowed)))
    monkeypatch.setattr(pricing._Bench, "summing", lambda self: Link(0.5))
    monkeypatch.setattr(pricing, "prices_of_short_run", lambda *_: of_run)
    config = compose_config(["model=mlp", "data=synthetic_vectors", "optimizer=sgd"])
    (found,) = run_on_threads(
        1, lambda world: pricing.measure_prices(config, world, Mesh(1, 1), Link(0.7), tmp_path)
    )
    assert (found.update, found.norm) == (ours, Pass(2.0))
    assert (found.send, found.summing) == (Link(0.7), Link(0.5))
    # A step is slowed by others that share its core; a plan multiplies that in again.
    assert (found.action_s, found.step_s) == (0.01, 0.2)
    assert found.measured.optimizer == "sgd" and found.process_bytes > 0


@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (2, 2), (2, 1)])
def test_sums_are_timed_among_the_ranks_of_a_host(monkeypatch, ranks, hosts):
    """Over two hosts they went at the pace of the network, and were used as those of one."""
    formed = []

    def body(world):
        found = pricing._Bench(None, world, SimpleNamespace(stages=ranks), 1.0)
        monkeypatch.setattr(
            pricing, "kernel_identity", lambda: f"host {int(current_rank.get()) * hosts // ranks}"
        )
        current_rank.set(world.rank)
        groups = found._ranks_of_hosts()
        if world.rank == 0:
            formed.append(groups)
        return found.summing()

    run_on_threads(ranks, body)
    each = ranks // hosts
    assert formed == [[list(range(h * each, (h + 1) * each)) for h in range(hosts)]]
