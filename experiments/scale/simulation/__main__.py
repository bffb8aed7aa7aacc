"""Simulate one step of jobs of 10 to 10,000 ranks on a described cluster.

    python -m experiments.scale.simulation                       # two minutes of one core
    python -m experiments.scale.simulation --most-ranks 100      # tries it

Writes table.md and rows.json into the folder of --out.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.scale.simulation.jobs import Row, rows
from gpipe_hpc.planner.cluster_file import read_cluster

HERE = Path(__file__).parent


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
    print(
        f"{time.monotonic() - begin_s:.0f} s in all, {time.process_time() - begin_cpu_s:.0f} s of "
        f"one core; see {args.out}"
    )


if __name__ == "__main__":
    main()
