"""CPU seconds and megabytes of building the tables of each schedule.

    python -m experiments.scale.table                                  # 64 x 512, then 512 x 2,048
    python -m experiments.scale.table --sizes 8x32                     # tries it
    python -m experiments.scale.table --sizes 512x2048 --schedules one_f_one_b

Each table is built in its own process. Writes a table in Markdown and its rows as JSON into the
folder of --out.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from experiments.scale.table.one import TableCosts
from gpipe_hpc.schedule.families.known import FAMILIES

HERE = Path(__file__).parent


def main() -> None:
    """Run the measurements, print and write the results."""
    given = _arguments()
    rows: list[TableCosts] = []
    for size in given.sizes:
        for name in given.schedules:
            rows.append(_made(name, *map(int, size.split("x"))))
            print(_line(rows[-1]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join((_machine(), "", _HEAD, *map(_line, rows))) + "\n"
    (given.out / "table.md").write_text(text)
    (given.out / "table.json").write_text(json.dumps([row._asdict() for row in rows], indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", default=["64x512", "512x2048"])
    parser.add_argument("--schedules", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder to write into")
    return parser.parse_args()


def _made(name: str, ranks: int, microbatches: int) -> TableCosts:
    """Build the tables of one schedule in a separate process, to measure its memory."""
    words = [name, str(ranks), str(microbatches)]
    command = [sys.executable, "-m", "experiments.scale.table.one", *words]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return TableCosts(**json.loads(told))


_HEAD = (
    "| schedule | ranks x micro-batches | actions | build | lower | check | evaluation | digests "
    "| CPU s | s a million | MB | a rank's row, kB | received in s |\n"
    "|---|---|" + 11 * "---:|"
)


def _line(made: TableCosts) -> str:
    parts = made.build_s, made.lower_s, made.check_s, made.evaluation_s, made.digest_s
    return (
        f"| {made.schedule} | {made.ranks} x {made.microbatches:,} | {made.num_actions:,} | "
        + " | ".join(f"{seconds:.2f}" for seconds in parts)
        + f" | {made.total_s:.1f} | {made.s_per_million:.1f} | {made.peak_mb:.0f} "
        f"| {made.row_bytes / 1000:.0f} | {made.row_s:.3f} |"
    )


def _machine() -> str:
    cores, load = os.cpu_count(), os.getloadavg()[0]
    return (
        f"{platform.processor() or platform.machine()}, {cores} cores, load {load:.0f} at the end; "
        f"Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}"
    )


if __name__ == "__main__":
    main()
