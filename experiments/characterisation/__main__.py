"""Sweep batch size, threads, processes and backend on this machine; one table each.

python -m experiments.characterisation                 # prints the tables: 15 minutes
python -m experiments.characterisation --only threads --rounds 1 --steps 2   # tries it
python -m experiments.characterisation --write         # writes README.md and results.json
python -m experiments.characterisation --read --write  # the page from results.json; runs nothing
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
from textwrap import fill
from typing import Final

import torch

from experiments.characterisation.measuring import PointRounds, measure_all, table
from experiments.characterisation.sweeps import Setting, Sweep, sweeps
from gpipe_hpc.bench.figures import PointResult
from gpipe_hpc.bench.running import measure

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results.json"
MODEL: Final = ("model=gpt", "data=synthetic", "comm.timeout_s=300")
LIMIT_S: Final = 300.0
INTRODUCTION: Final = """# Step time by batch size, threads, processes and backend

The sweeps of Jain et al. (CLUSTER 2019) and Awan et al. (CCGrid 2019), on one machine. They used
clusters of CPUs and GPUs; their figures were not found, so they are not compared.

**Method.** A small GPT (`model=gpt`: 4 blocks, 128 tokens) in float32; each point has its own
processes. Every round measures all points in turn, so that other load affects all equally. A row
shows the median over rounds of the median step; the spread is the range of the rounds divided by
their median.

    python -m experiments.characterisation --write                  # a quarter of an hour
    python -m experiments.characterisation --only threads --write   # keeps the other three
"""


def _measured(setting: Setting, steps: int) -> PointResult:
    words = [*MODEL, *setting.words, f"bench.steps={steps}"]
    return measure(setting.point, words, LIMIT_S)


def page(
    made: Sequence[Sweep], found: Sequence[Sequence[PointRounds]], machines: Sequence[str]
) -> str:
    """Return one section per sweep, with its machine and its table."""
    parts = []
    for sweep, lines, where in zip(made, found, machines, strict=True):
        told = fill(f"{sweep.setting}. {where}", 100)
        parts.append(f"## {sweep.title}\n\n{told}\n\n{table(lines)}")
    return "\n\n".join(parts)


def _machine(rounds: int, steps: int) -> str:
    date = time.strftime("%Y-%m-%d")
    load = os.getloadavg()[0]
    told = (
        f"{rounds} rounds of {steps} steps, {os.cpu_count()} cores ({platform.machine()}), load "
        f"{load:.1f} at the start, torch {torch.__version__} on the CPU, {date}."
    )
    return fill(told, 100)


def _write(
    made: Sequence[Sweep], found: Sequence[Sequence[PointRounds]], told: Sequence[str]
) -> None:
    text = page(made, found, told)
    (HERE / "README.md").write_text(f"{INTRODUCTION}\n{text}\n", encoding="utf-8")
    results = {
        sweep.name: {"told": where, "rounds_s": {e.setting.name: e.rounds_s for e in lines}}
        for sweep, lines, where in zip(made, found, told, strict=True)
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def on_file(made: Sequence[Sweep]) -> dict[str, tuple[list[PointRounds], str]]:
    """Return stored results by sweep: the lines, and the description of the machine."""
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    return {
        sweep.name: (
            [
                PointRounds(each, known[sweep.name]["rounds_s"].get(each.name, []))
                for each in sweep.settings
            ],
            known[sweep.name]["told"],
        )
        for sweep in made
        if sweep.name in known
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Sweep batch size, threads, processes, backend")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all points (default 5)")
    parser.add_argument(
        "--steps", type=int, default=10, help="steps per point and round (default 10)"
    )
    parser.add_argument("--only", choices=[each.name for each in sweeps()], help="one sweep")
    parser.add_argument("--read", action="store_true", help="measure nothing; use results.json")
    parser.add_argument("--write", action="store_true", help="write README.md and results.json")
    words = parser.parse_args()
    if words.rounds < 1 or words.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    known = on_file(sweeps())
    if words.read and not known:
        parser.error(f"--read: {RESULTS} has no results; measure without --read")
    asked = [each for each in sweeps() if words.only in (None, each.name) and not words.read]
    told = _machine(words.rounds, words.steps)
    measured = measure_all(asked, words.rounds, partial(_measured, steps=words.steps))
    new = {sweep.name: (lines, told) for sweep, lines in zip(asked, measured, strict=True)}
    known = {**known, **new} if words.read or words.write else new
    shown = [each for each in sweeps() if each.name in known]
    found, places = zip(*(known[each.name] for each in shown), strict=True)
    print(page(shown, found, places))
    if words.write:
        _write(shown, found, places)
    return 0 if all(each.rounds_s for lines in found for each in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
