"""The hardware assumed by a search: compute rates and links of the ranks."""

from dataclasses import dataclass, replace
from typing import Final

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.advice import KnownCosts
from gpipe_hpc.planner.costs.cost_models import COUNTED, CostModel, LayerTimes, work_of
from gpipe_hpc.planner.costs.prices import FREE as FREE_PRICES
from gpipe_hpc.planner.costs.prices import Prices
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.costs.work import PassWork
from gpipe_hpc.planner.step_time import Oversubscription
from gpipe_hpc.schedule import Cluster, Link

FREE: Final = Link()


@dataclass(frozen=True)
class Machine:
    """Ranks of equal speed on a cluster, numbered host by host.

    Attributes:
      rates: sustained FLOP/s and bytes/s of a rank.
      layer_s: constant overhead of a layer's forward, and of each half of its backward.
      host_bytes_per_s: bandwidth of ``offload`` copies; None if unknown (then they are free).
      prices: overheads of a step in addition to its layers.
      clips: whether gradients are clipped by norm.
      cores: cores of each host if ranks are CPUs and the number is known.
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
        """Return the cluster with the links that gradient all-reduces use."""
        link = self.prices.summing
        return self.cluster if link == FREE else replace(self.cluster, within=link)

    @property
    def crowd(self) -> Oversubscription | None:
        """Return ranks and cores of the host with most ranks, or None if the cores are unknown."""
        return None if self.cores is None else Oversubscription(max(self.cluster.hosts), self.cores)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the cluster."""
        return self.cluster.num_ranks

    @property
    def has_free_links(self) -> bool:
        """Return whether links are unknown, so that transfers take no time."""
        return self.cluster.within == FREE and self.cluster.between == FREE

    def priced(self, cost_model: CostModel) -> KnownCosts:
        """Convert counted FLOPs to seconds on this machine; measured seconds are unchanged."""
        times = cost_model.times
        if cost_model.measure == COUNTED:
            times = tuple(map(self._seconds, work_of(cost_model.count)))
        return KnownCosts(cost_model.layers, times, cost_model.count)

    def _seconds(self, work: PassWork) -> LayerTimes:
        forward = self.rates.seconds(work.forward) + self.layer_s
        of_input = self.rates.seconds(work.of_input) + self.layer_s
        of_weight = self.rates.seconds(work.of_weight)
        of_weight += self.layer_s if of_weight else 0.0
        return LayerTimes.alike(forward, of_input + of_weight, of_input, of_weight)


def on_hosts(num_ranks: int, num_hosts: int) -> tuple[int, ...]:
    """Divide ranks evenly over hosts; raise ConfigError if that is impossible."""
    if num_ranks % num_hosts:
        near = [n for n in (num_ranks // num_hosts, num_ranks // num_hosts + 1) if n]
        fitting = " or ".join(str(n * num_hosts) for n in near)
        raise ConfigError(
            f"plan.hosts: {num_ranks} ranks cannot be divided evenly over {num_hosts} hosts; use "
            f"{fitting} ranks, another number of hosts, or list the ranks of each host in "
            f"plan.links"
        )
    return (num_ranks // num_hosts,) * num_hosts
