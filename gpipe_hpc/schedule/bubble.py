"""Why ranks idle: the bubble of a table, split by cause."""

from typing import NamedTuple

from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.simulator import simulate
from gpipe_hpc.schedule.table.schedule import Schedule


class BubbleCauses(NamedTuple):
    """Parts of the bubble, each a share of the total time of all ranks; they sum to the bubble."""

    fill_and_drain: float
    imbalance: float
    transfers: float
    reduction_tail: float


def explain_bubble(schedule: Schedule, costs: Costs) -> BubbleCauses:
    """Split the bubble of a simulated table by what would take the idle time away.

    Transfers: idle time that is gone when they, and copies, take no time. Imbalance: what is then
    still idle even if the busiest rank never waits. Fill and drain: the rest of the time that ranks
    wait for one another. Reduction tail: from the end of all compute to that of the last reduction.
    No part is negative, as less to wait for never makes a table of fixed order slower.
    """
    timeline = simulate(schedule, costs)
    total = timeline.num_ranks * timeline.makespan
    if total <= 0:
        return BubbleCauses(0.0, 0.0, 0.0, 0.0)
    busy = timeline.busy
    with_transfers = timeline.end_of_compute
    without = simulate(schedule, costs.without_transfers()).end_of_compute
    num_ranks = timeline.num_ranks
    return BubbleCauses(
        fill_and_drain=(without - max(busy)) * num_ranks / total,
        imbalance=(max(busy) * num_ranks - sum(busy)) / total,
        transfers=(with_transfers - without) * num_ranks / total,
        reduction_tail=(timeline.makespan - with_transfers) * num_ranks / total,
    )
