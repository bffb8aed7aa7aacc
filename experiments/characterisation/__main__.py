"""Sweep batch size, threads, processes and backend on this machine; one table each.

python -m experiments.characterisation                 # prints the tables: minutes
python -m experiments.characterisation --rounds 1 --steps 2   # tries it
python -m experiments.characterisation --write         # README.md and results.json anew
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from experiments.characterisation.measuring import Found, measure_all, table
from experiments.characterisation.sweeps import Setting, Sweep, sweeps
from gpipe_hpc.bench.figures import Measured
from gpipe_hpc.bench.running import measure

HERE: Final = Path(__file__).parent
MODEL: Final = ("model=gpt", "data=synthetic", "comm.timeout_s=300")
LIMIT_S: Final = 300.0
INTRODUCTION: Final = """# The literature's characterisations, on one machine

**What it shows.** How fast a step is by batch size, threads, processes and backend: the sweeps of
Jain et al. (CLUSTER 2019) and of Awan et al. (CCGrid 2019), whose machines were clusters of CPUs
and GPUs. Their figures are not compared, as they were not found; what is copied is the question.

**How.** A small GPT (`model=gpt`: 4 blocks, 128 tokens), float32, in processes of its own for every
point. Rounds go over all points in turn, so whatever else the machine does meets them alike. A
round's figure is its median step, a line's the median over rounds; the spread is the slowest round
less the fastest one, over the median.

    python -m experiments.characterisation --rounds 5 --write
"""


def _measured(setting: Setting, steps: int) -> Measured:
    words = [*MODEL, *setting.words, f"bench.steps={steps}"]
    return measure(setting.point, words, LIMIT_S)


def page(made: Sequence[Sweep], found: Sequence[Sequence[Found]], told: str) -> str:
    """Return all tables under what they were measured on."""
    parts = [told]
    for sweep, lines in zip(made, found, strict=True):
        parts.append(f"## {sweep.title}\n\nAsked: {sweep.question}.\n\n{table(lines)}")
    return "\n\n".join(parts)


def _machine(rounds: int, steps: int) -> str:
    date = time.strftime("%Y-%m-%d")
    load = os.getloadavg()[0]
    return (
        f"**What it gave.** {rounds} rounds of {steps} steps, {os.cpu_count()} cores\n"
        f"({platform.machine()}), load {load:.1f} at the start, torch {torch.__version__} on the "
        f"CPU, {date}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Sweep batch size, threads, processes, backend")
    parser.add_argument("--rounds", type=int, default=3, help="over all points (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="of a point in a round (default 10)")
    parser.add_argument("--write", action="store_true", help="write README.md and results.json")
    words = parser.parse_args()
    if words.rounds < 1 or words.steps < 1:
        parser.error("--rounds, --steps: expected numbers from 1 up; correct them")
    told, made = _machine(words.rounds, words.steps), sweeps()
    found = measure_all(made, words.rounds, partial(_measured, steps=words.steps))
    text = page(made, found, told)
    print(text)
    if words.write:
        (HERE / "README.md").write_text(f"{INTRODUCTION}\n{text}\n", encoding="utf-8")
        results = {
            sweep.title: {each.setting.name: each.rounds_s for each in lines}
            for sweep, lines in zip(made, found, strict=True)
        }
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(each.rounds_s for lines in found for each in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
