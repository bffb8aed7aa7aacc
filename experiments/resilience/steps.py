"""Slowdown of a step with missing hosts, simulated with the project's own tables."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from experiments.resilience.inputs import Inputs
from gpipe_hpc.schedule import Costs, build, simulate
from gpipe_hpc.schedule.families.rerouted import num_copies

LOST_HOSTS = (1, 2, 4, 8, 12)  # between which times are interpolated
COSTS = Costs(forward=1, input_gradient=1, weight_gradient=1)


@dataclass(frozen=True)
class Slowdowns:
    """Relative step time by number of missing hosts, simulated for some numbers.

    Other numbers are interpolated; beyond the largest, the remaining hosts do proportionally more.
    """

    num_hosts: int
    known: dict[int, float]

    def __call__(self, lost: int) -> float:
        """Return the slowdown for any number of missing hosts; infinity if none is left."""
        if lost >= self.num_hosts:
            return math.inf
        known = {0: 1.0, **self.known}
        below = max(number for number in known if number <= lost)
        above = min((number for number in known if number >= lost), default=None)
        if above is None:
            return known[below] * (self.num_hosts - below) / (self.num_hosts - lost)
        share = (lost - below) / (above - below) if above > below else 0.0
        return (1 - share) * known[below] + share * known[above]


@cache
def _whole(stages: int, microbatches: int) -> float:
    return simulate(build("zb_h1", ranks=stages, microbatches=microbatches), COSTS).makespan


def whole_replicas(inputs: Inputs, lost: int) -> float:
    """Return the slowdown if the remaining ranks form as many complete replicas as possible.

    The batch stays the same; infinity if they form none.
    """
    ranks = inputs.num_ranks - lost * inputs.ranks_per_host
    rows = min(inputs.replicas, ranks // inputs.stages)
    if rows < 1:
        return math.inf
    total = inputs.microbatches * inputs.replicas
    took = _whole(inputs.stages, -(-total // rows))
    return took / _whole(inputs.stages, inputs.microbatches)


def with_copies(inputs: Inputs, copies: Sequence[int], room: int, costs: Costs = COSTS) -> float:
    """Return the slowdown of a table with a given number of ranks per stage."""
    table = build(
        "rerouted",
        ranks=sum(copies),
        microbatches=inputs.microbatches * inputs.replicas,
        stages=inputs.stages,
        copies=copies,
        room=room,
    )
    took = simulate(table, costs).makespan
    return took / _whole(inputs.stages, inputs.microbatches)


def replanned(inputs: Inputs, lost: int, room: int) -> float:
    """Return the slowdown if the remaining ranks hold stages as evenly as possible."""
    ranks = inputs.num_ranks - lost * inputs.ranks_per_host
    return with_copies(inputs, num_copies(ranks, inputs.stages), room)


def cut_anew(inputs: Inputs, lost: int, room: int) -> float:
    """Return the slowdown if stages on fewer ranks also get proportionally less work.

    Assumes layers that are fine enough for any partition.
    """
    ranks = inputs.num_ranks - lost * inputs.ranks_per_host
    copies = num_copies(ranks, inputs.stages)
    work = [number * inputs.stages / ranks for number in copies]
    costs = Costs(forward=work, input_gradient=work, weight_gradient=work)
    return with_copies(inputs, copies, room, costs)


def as_they_fell(inputs: Inputs, lost: int, room: int, draws: int, seed: int = 0) -> float:
    """Return the mean slowdown if the other ranks keep their stages.

    Failed hosts are random; the ranks of a host are consecutive in a replica, or span two.
    """
    found = []
    for draw in range(draws):
        hosts = random.Random(f"{seed}/{lost}/{draw}").sample(range(inputs.num_hosts), lost)
        copies = [inputs.replicas] * inputs.stages
        for host in hosts:
            for at in range(inputs.ranks_per_host):
                rank = host * inputs.ranks_per_host + at
                if rank < inputs.num_ranks:
                    copies[rank % inputs.stages] -= 1
        found.append(with_copies(inputs, copies, room))
    return sum(found) / len(found)
