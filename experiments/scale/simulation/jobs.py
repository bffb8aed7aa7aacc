"""The simulated jobs: one step of each, as one row of the table."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.scale.simulation.model import Model, Work
from gpipe_hpc.schedule import (
    Cluster,
    Costs,
    Link,
    Schedule,
    build,
    lower,
    side_by_side,
    simulate,
    simulate_job,
)

SCHEDULES = {"one_f_one_b": 1, "interleaved": 2, "zb_v": 2}  # stages per rank
# Stages and replicas: more replicas of 10 ranks, or pipelines that also grow deeper.
WIDER = [(10, replicas) for replicas in (1, 3, 10, 30, 100, 300, 1000)]
DEEPER = [(10, 1), (20, 5), (50, 20), (100, 100)]
MICROBATCHES_PER_RANK = 4
TOGETHER_RANKS = 100  # largest job that is also simulated event by event


@dataclass(frozen=True)
class Row:
    """One simulated step."""

    growth: str
    schedule: str
    cluster: str
    ranks: int
    stage_ranks: int
    replicas: int
    different_replicas: int
    microbatches: int
    actions: int
    step_s: float
    bubble: float
    reduction_share: float
    slowest_replica: int
    table_cpu_s: float
    simulation_cpu_s: float
    together_cpu_s: float | None


def simulated(
    growth: str, schedule: str, cluster: tuple[str, Cluster], shape: tuple[int, int], work: Work
) -> Row:
    """Return the simulated step of several replicas; both simulators must agree bitwise."""
    ranks, replicas = shape
    microbatches = MICROBATCHES_PER_RANK * ranks
    options: dict[str, Any] = {"stages_per_rank": 2} if schedule == "interleaved" else {}
    begin_s = time.process_time()
    bare = build(schedule, ranks=ranks, microbatches=microbatches, **options)
    table = lower(bare, work.buckets)
    tabulated_s = time.process_time()
    costs = cluster[1].replicas(table, work.costs, replicas, work.gradient_bytes)
    job = simulate_job(table, costs)
    simulated_s = time.process_time()
    together_s = None
    if job.num_ranks <= TOGETHER_RANKS:
        whole = together(table, costs)
        together_s = time.process_time() - simulated_s
        assert whole == job.makespan, f"event by event a step takes {whole}, not {job.makespan}"
    return Row(
        growth=growth,
        schedule=schedule,
        cluster=cluster[0],
        ranks=job.num_ranks,
        stage_ranks=ranks,
        replicas=replicas,
        different_replicas=len({id(each) for each in costs}),
        microbatches=microbatches,
        actions=replicas * sum(map(len, table.ranks)),
        step_s=job.makespan,
        bubble=job.bubble,
        reduction_share=job.reduction_share,
        slowest_replica=job.slowest,
        table_cpu_s=tabulated_s - begin_s,
        simulation_cpu_s=simulated_s - tabulated_s,
        together_cpu_s=together_s,
    )


def together(table: Schedule, costs: Sequence[Costs]) -> float:
    """Return the step simulated with all ranks in one table, event by event."""
    links: dict[tuple[int, int], Link] = {}
    paces: dict[int, float] = {}
    for replica, each in enumerate(costs):
        base = replica * table.num_ranks
        links |= {(base + a, base + b): link for (a, b), link in each.links.items()}
        paces |= {base + rank: pace for rank, pace in each.paces.items()}
    whole = side_by_side(table, len(costs))
    return simulate(whole, replace(costs[0], links=links, paces=paces)).makespan


def rows(described: Cluster, most_ranks: int) -> Iterator[Row]:
    """Simulate all jobs of at most the given number of ranks."""
    even = replace(described, host_links={}, rank_links={}, paces={})
    model = Model()
    for growth, shapes in (("wider", WIDER), ("deeper", DEEPER)):
        for schedule, per_rank in SCHEDULES.items():
            for shape in (each for each in shapes if math.prod(each) <= most_ranks):
                work = model.work(shape[0] * per_rank)
                for cluster in (("even", even), ("described", described)):
                    yield simulated(growth, schedule, cluster, shape, work)
