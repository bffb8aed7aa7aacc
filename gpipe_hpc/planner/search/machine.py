"""What a search takes the ranks to be: how fast they compute, and how they are linked."""

from dataclasses import dataclass, replace
from typing import Final

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.advice import Known
from gpipe_hpc.planner.costs.gauges import COUNTED, Gauge, LayerTimes, work_of
from gpipe_hpc.planner.costs.prices import FREE as FREE_PRICES
from gpipe_hpc.planner.costs.prices import Prices
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.costs.work import Passes
from gpipe_hpc.planner.step_time import Crowd
from gpipe_hpc.schedule import Cluster, Link

FREE: Final = Link()


@dataclass(frozen=True)
class Machine:
    """Ranks of one speed on a cluster, whose world ranks are numbered host by host.

    `rates`: what a rank does a second in practice. `layer_s`: what the forward of a layer
    takes besides, however few its samples are; each half of its backward takes as much.
    `host_bytes_per_s`: of the copies of ``offload``; None: not known, and they take no time.
    `prices`: what a step takes beside its layers. `clips`: whether gradients are clipped by their
    norm. `cores`: of each host, where ranks are CPUs and that is known.
    """

    cluster: Cluster
    rates: Rates
    layer_s: float = 0.0
    host_bytes_per_s: float | None = None
    prices: Prices = FREE_PRICES
    clips: bool = False
    cores: int | None = None

    @property
    def summing(self) -> Cluster:
        """Return the ranks with the links that sums of gradients have."""
        link = self.prices.summing
        return self.cluster if link == FREE else replace(self.cluster, within=link)

    @property
    def crowd(self) -> Crowd | None:
        """Return how many ranks share how many cores; None where that is not known."""
        return None if self.cores is None else Crowd(max(self.cluster.hosts), self.cores)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.cluster.num_ranks

    @property
    def has_free_links(self) -> bool:
        """Say whether nothing is known of the links: transfers take no time."""
        return self.cluster.within == FREE and self.cluster.between == FREE

    def priced(self, gauge: Gauge) -> Known:
        """Return a gauge of seconds on this machine for one that counts FLOPs, or measures."""
        times = gauge.times
        if gauge.measure == COUNTED:
            times = tuple(map(self._seconds, work_of(gauge.count)))
        return Known(gauge.layers, times, gauge.count)

    def _seconds(self, work: Passes) -> LayerTimes:
        forward = self.rates.seconds(work.forward) + self.layer_s
        of_input = self.rates.seconds(work.of_input) + self.layer_s
        of_weight = self.rates.seconds(work.of_weight)
        of_weight += self.layer_s if of_weight else 0.0
        return LayerTimes.alike(forward, of_input + of_weight, of_input, of_weight)


def on_hosts(num_ranks: int, num_hosts: int) -> tuple[int, ...]:
    """Return the ranks of each host, all alike; ConfigError if they cannot be."""
    if num_ranks % num_hosts:
        near = [n for n in (num_ranks // num_hosts, num_ranks // num_hosts + 1) if n]
        fitting = " or ".join(str(n * num_hosts) for n in near)
        raise ConfigError(
            f"plan.hosts: expected hosts that all have as many of {num_ranks} ranks, got "
            f"{num_hosts}; take {fitting} ranks, another number of hosts, or say in plan.links how "
            f"many ranks each host has"
        )
    return (num_ranks // num_hosts,) * num_hosts
