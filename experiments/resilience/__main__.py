"""Simulate step times of pipelines with missing ranks, with the project's own tables.

python -m experiments.resilience            # two or three minutes of one core
python -m experiments.resilience --small    # only pipelines of up to eight ranks: seconds
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Final, NamedTuple

from gpipe_hpc.schedule import Costs, build, simulate
from gpipe_hpc.schedule.families.rerouted import num_copies

LOST_HOSTS: Final = (1, 2, 4, 8, 12)
ROOM: Final = 12  # a quarter of the stages; the default of the schedule is 1
ORDERS: Final = ("gpipe", "one_f_one_b", "zb_h1")
SMALL: Final = ((3, 2), (5, 2), (5, 4), (6, 4), (7, 4), (8, 4), (7, 3))  # ranks, stages
SMALL_MICROBATCHES: Final = 8  # per pipeline
COSTS: Final = Costs(forward=1, input_gradient=1, weight_gradient=1)


class Job(NamedTuple):
    """A job of `stages` x `replicas` ranks; `microbatches` is the number per replica."""

    stages: int = 50
    replicas: int = 20
    microbatches: int = 200
    ranks_per_host: int = 8

    def ranks_without(self, num_hosts: int) -> int:
        """Return the number of ranks if some hosts are missing."""
        return self.stages * self.replicas - num_hosts * self.ranks_per_host


@cache
def _whole(stages: int, microbatches: int) -> float:
    return simulate(build("zb_h1", ranks=stages, microbatches=microbatches), COSTS).makespan


def whole_replicas(job: Job, lost: int) -> float:
    """Return the relative step time if the remaining ranks form complete replicas.

    The batch stays the same; infinity if they form no replica.
    """
    rows = min(job.replicas, job.ranks_without(lost) // job.stages)
    if rows < 1:
        return math.inf
    total = job.microbatches * job.replicas
    took = _whole(job.stages, -(-total // rows))
    return took / _whole(job.stages, job.microbatches)


def rerouted(job: Job, lost: int, room: int) -> float:
    """Return the relative step time if the remaining ranks hold equal stages as evenly as possible.

    Peers in other replicas run the micro-batches of missing ranks; see the schedule `rerouted`.
    """
    return _with_copies(job, num_copies(job.ranks_without(lost), job.stages), room, COSTS)


def partitioned_again(job: Job, lost: int, room: int) -> float:
    """Return the relative step time if stages on fewer ranks also get proportionally less work.

    Assumes layers that are fine enough for any partition.
    """
    ranks = job.ranks_without(lost)
    copies = num_copies(ranks, job.stages)
    return _with_copies(job, copies, room, _even_costs(ranks, copies))


def _even_costs(ranks: int, copies: Sequence[int]) -> Costs:
    """Return costs with which all ranks are equally busy."""
    work = [number * len(copies) / ranks for number in copies]
    return Costs(forward=work, input_gradient=work, weight_gradient=work)


def _with_copies(job: Job, copies: Sequence[int], room: int, costs: Costs) -> float:
    table = build(
        "rerouted",
        ranks=sum(copies),
        microbatches=job.microbatches * job.replicas,
        stages=job.stages,
        copies=copies,
        room=room,
    )
    return simulate(table, costs).makespan / _whole(job.stages, job.microbatches)


def small_step(ranks: int, stages: int, order: str) -> float:
    """Return the step time of a small pipeline over its work divided by all ranks.

    The partition gives less work to stages with fewer ranks.
    """
    copies = num_copies(ranks, stages)
    microbatches = SMALL_MICROBATCHES * max(copies)
    table = build(
        "rerouted",
        ranks=ranks,
        microbatches=microbatches,
        stages=stages,
        copies=copies,
        order=order,
    )
    ideal = 3 * microbatches * stages / ranks
    return simulate(table, _even_costs(ranks, copies)).makespan / ideal


def small_table() -> str:
    """Return the step times of small pipelines, in Markdown."""
    lines = [
        f"| ranks | stages | ranks of each stage | {' | '.join(ORDERS)} |",
        "|---:|---:|---|" + "---:|" * len(ORDERS),
    ]
    for ranks, stages in SMALL:
        copies = ", ".join(map(str, num_copies(ranks, stages)))
        cells = " | ".join(f"{small_step(ranks, stages, order):.2f}" for order in ORDERS)
        lines.append(f"| {ranks} | {stages} | {copies} | {cells} |")
    return "\n".join(lines)


def large_table(job: Job) -> str:
    """Return the relative step times of a job with missing hosts, in Markdown."""
    ways: dict[str, Callable[[int], float]] = {
        "complete replicas only": partial(whole_replicas, job),
        f"re-routed, `room={ROOM}`": partial(rerouted, job, room=ROOM),
        "re-routed, `room=1`": partial(rerouted, job, room=1),
        f"re-routed and partitioned again, `room={ROOM}`": partial(
            partitioned_again, job, room=ROOM
        ),
    }
    lines = [
        f"| missing hosts | {' | '.join(map(str, LOST_HOSTS))} |",
        "|---|" + "---:|" * len(LOST_HOSTS),
    ]
    for name, way in ways.items():
        lines.append(f"| {name} | {' | '.join(f'{way(lost):.2f}' for lost in LOST_HOSTS)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate pipelines with missing ranks")
    parser.add_argument("--small", action="store_true", help="only pipelines of up to eight ranks")
    args = parser.parse_args()
    print(small_table())
    if not args.small:
        print(f"\n{large_table(Job())}")


if __name__ == "__main__":
    main()
