"""How much longer a step takes with hosts missing: from the project's own tables, simulated."""

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
    """How many times as long a step takes with so many of the hosts missing, simulated for some.

    Between those it is interpolated; beyond them the hosts that are left have as much more to do.
    """

    num_hosts: int
    known: dict[int, float]

    def __call__(self, lost: int) -> float:
        """Return it for any number; infinity where no host is left."""
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
    """Return the slowdown where the ranks that are left make as many whole replicas as they can.

    The batch stays; infinite where they make none.
    """
    ranks = inputs.num_ranks - lost * inputs.ranks_per_host
    rows = min(inputs.replicas, ranks // inputs.stages)
    if rows < 1:
        return math.inf
    total = inputs.microbatches * inputs.replicas
    took = _whole(inputs.stages, -(-total // rows))
    return took / _whole(inputs.stages, inputs.microbatches)


def with_copies(inputs: Inputs, copies: Sequence[int], room: int, costs: Costs = COSTS) -> float:
    """Return the slowdown of a table in which so many ranks hold each stage."""
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
    """Return the slowdown where the ranks that are left hold stages as evenly as can be."""
    ranks = inputs.num_ranks - lost * inputs.ranks_per_host
    return with_copies(inputs, num_copies(ranks, inputs.stages), room)


def cut_anew(inputs: Inputs, lost: int, room: int) -> float:
    """Return the slowdown where stages on fewer ranks also get as much less to do.

    As if layers were fine enough for any cut.
    """
    ranks = inputs.num_ranks - lost * inputs.ranks_per_host
    copies = num_copies(ranks, inputs.stages)
    work = [number * inputs.stages / ranks for number in copies]
    costs = Costs(forward=work, input_gradient=work, weight_gradient=work)
    return with_copies(inputs, copies, room, costs)


def as_they_fell(inputs: Inputs, lost: int, room: int, draws: int, seed: int = 0) -> float:
    """Return the mean slowdown where the other ranks stay where they are.

    Hosts are drawn; the ranks of one lie behind one another in a replica, or end one and begin the
    next.
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
