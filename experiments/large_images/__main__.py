"""The largest images that each schedule fits, as planned; with --run, a small case is measured.

python -m experiments.large_images              # 20 seconds of one core
python -m experiments.large_images --run        # also three runs of four processes: two minutes
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from experiments.large_images.planned import (
    CONTESTANTS,
    MODEL,
    Contestant,
    fullest_bytes,
    largest_side,
    step_in_forwards,
)

RUN: Final = {"gpipe": "gpipe", "one_f_one_b": "one_f_one_b", "gems": "gems"}
RECOMPUTE: Final = ("never", "always")


class Options(NamedTuple):
    """Options: ranks, images per step, and memory limit of each rank in bytes."""

    ranks: int
    images: int
    memory_bytes: float


def line(contestant: Contestant, asked: Options) -> str:
    """Return the largest image and the step time, without and with recomputation."""
    cells = [contestant.name]
    for recompute in RECOMPUTE:

        def fits(side: int, recompute: str = recompute) -> bool:
            held, _ = fullest_bytes(side, contestant, asked.ranks, asked.images, recompute)
            return held <= asked.memory_bytes

        took = step_in_forwards(contestant, asked.ranks, asked.images, recompute)
        cells += [f"{largest_side(fits):,}", f"{took:.2f}"]
    return f"| {' | '.join(cells)} |"


def planned(asked: Options) -> str:
    """Return the table of all schedules."""
    lines = [
        "| | largest side, nothing recomputed | step | largest side, all recomputed | step |",
        "|---|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(line(each, asked) for each in CONTESTANTS)])


def measured(side: int, asked: Options) -> str:
    """Run some steps of each schedule on four processes; return the memory of the fullest rank."""
    lines = [
        "| | planned, MB | measured above the memory before the model, MB |",
        "|---|---:|---:|",
    ]
    for name, schedule in RUN.items():
        contestant = Contestant(name, schedule)
        held, balance = fullest_bytes(side, contestant, asked.ranks, asked.images, "never")
        took = _peak_bytes(schedule, side, asked, balance)
        lines.append(f"| {name} | {held / 1e6:,.0f} | {took / 1e6:,.0f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def _peak_bytes(schedule: str, side: int, asked: Options, balance: list[int]) -> int:
    with tempfile.TemporaryDirectory(prefix="large_images_") as folder:
        words = [
            f"model={MODEL}",
            "data=synthetic_images",
            "data.num_classes=10",
            f"data.height={side}",
            f"data.width={side}",
            f"train.batch_size={asked.images}",
            f"pipeline.microbatches={asked.images}",
            f"pipeline.stages={asked.ranks}",
            f"pipeline.schedule={schedule}",
            f"pipeline.partition={json.dumps(balance, separators=(',', ':'))}",
            "pipeline.recompute=never",
            "optimizer=sgd",
            "train.steps=2",
            "train.validate_every=0",
            "train.keep_freed_memory=false",
            "train.num_threads=1",
            "checkpoint.every=0",
            f"run.dir={folder}/run",
        ]
        launch = ["--standalone", f"--nproc_per_node={asked.ranks}", "-m", "gpipe_hpc.train"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        summary = json.loads(Path(folder, "run", "summary.json").read_text("utf-8"))
        peaks = [
            rank["peak_memory_bytes"] - rank["memory_before_bytes"] for rank in summary["ranks"]
        ]
        return int(max(peaks))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.large_images")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--images", type=int, default=8, help="of a step, each a micro-batch")
    parser.add_argument("--memory", type=float, default=16.0, help="GiB that a rank may fill")
    parser.add_argument("--run", action="store_true", help="run a small case as well")
    parser.add_argument("--side", type=int, default=128, help="pixels of the images that are run")
    words = parser.parse_args()
    asked = Options(words.ranks, words.images, words.memory * 2**30)
    print(planned(asked))
    if words.run:
        print(f"\n{measured(words.side, asked)}")


if __name__ == "__main__":
    main()
