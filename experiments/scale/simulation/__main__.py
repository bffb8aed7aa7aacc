"""Simulate one step of jobs of 10 to 10,000 ranks on a described cluster, and draw the growth.

    python -m experiments.scale.simulation                       # two minutes of one core
    python -m experiments.scale.simulation --most-ranks 100      # tries it

Writes a table in Markdown, the rows as JSON, and two pictures into the folder of --out.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.scale.simulation.model import Model, Work
from experiments.scale.simulation.plot import draw
from gpipe_hpc.planning.cluster_file import read_cluster
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

HERE = Path(__file__).parent
SCHEDULES = {"one_f_one_b": 1, "interleaved": 2, "zb_v": 2}  # with the stages of a rank
# Replicas of 10 ranks, more and more of them; or pipelines that grow deeper as well.
WIDER = [(10, replicas) for replicas in (1, 3, 10, 30, 100, 300, 1000)]
DEEPER = [(10, 1), (20, 5), (50, 20), (100, 100)]
MICROBATCHES_PER_RANK = 4
TOGETHER_RANKS = 100  # up to which all ranks are simulated event by event as well


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
    """Return what a step of some replicas takes; equal to the last bit where both ways ran."""
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
    """Return the step with all ranks in one table, event by event."""
    links: dict[tuple[int, int], Link] = {}
    paces: dict[int, float] = {}
    for replica, each in enumerate(costs):
        base = replica * table.num_ranks
        links |= {(base + a, base + b): link for (a, b), link in each.links.items()}
        paces |= {base + rank: pace for rank, pace in each.paces.items()}
    whole = side_by_side(table, len(costs))
    return simulate(whole, replace(costs[0], links=links, paces=paces)).makespan


def rows(described: Cluster, most_ranks: int) -> Iterator[Row]:
    """Simulate all jobs of at most so many ranks."""
    even = replace(described, host_links={}, rank_links={}, paces={})
    model = Model()
    for growth, shapes in (("wider", WIDER), ("deeper", DEEPER)):
        for schedule, per_rank in SCHEDULES.items():
            for shape in (each for each in shapes if math.prod(each) <= most_ranks):
                work = model.work(shape[0] * per_rank)
                for cluster in (("even", even), ("described", described)):
                    yield simulated(growth, schedule, cluster, shape, work)


def table_of(found: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| growth | schedule | ranks | stages x replicas | step s: even | with slow ranks | bubble "
        "| with slow ranks | reductions | with slow ranks | different replicas | actions "
        "| table s | simulation s | event by event s |",
        "|---|---|" + 13 * "---:|",
    ]
    for even, slow in zip(found[::2], found[1::2], strict=True):
        together_s = slow.together_cpu_s
        cells = [
            slow.growth,
            slow.schedule,
            f"{slow.ranks:,}",
            f"{slow.stage_ranks} x {slow.replicas}",
            f"{even.step_s:.2f}",
            f"{slow.step_s:.2f}",
            f"{even.bubble:.1%}",
            f"{slow.bubble:.1%}",
            f"{even.reduction_share:.1%}",
            f"{slow.reduction_share:.1%}",
            str(slow.different_replicas),
            f"{slow.actions:,}",
            f"{slow.table_cpu_s:.2f}",
            f"{slow.simulation_cpu_s:.2f}",
            "" if together_s is None else f"{together_s:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", type=Path, default=HERE / "cluster.yaml")
    parser.add_argument("--most-ranks", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=HERE / "out")
    args = parser.parse_args()
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    found: list[Row] = []
    for row in rows(read_cluster(args.cluster), args.most_ranks):
        found.append(row)
        print(
            f"{row.growth:6} {row.schedule:11} {row.cluster:9} {row.ranks:6,} ranks: "
            f"step {row.step_s:.2f} s, {row.simulation_cpu_s:.2f} s to simulate",
            flush=True,
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rows.json").write_text(json.dumps([asdict(row) for row in found], indent=1))
    (args.out / "table.md").write_text(table_of(found))
    for growth in ("wider", "deeper"):
        text = draw([row for row in found if row.growth == growth])
        (args.out / f"{growth}.svg").write_text(text)
    print(
        f"{time.monotonic() - begin_s:.0f} s in all, {time.process_time() - begin_cpu_s:.0f} s of "
        f"one core; see {args.out}"
    )


if __name__ == "__main__":
    main()
