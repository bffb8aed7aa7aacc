"""Sweep batch size, threads, processes and backend on this machine; a table and a picture each.

python -m experiments.characterisation                 # prints the tables: a quarter of an hour
python -m experiments.characterisation --only threads --rounds 1 --steps 2   # tries it
python -m experiments.characterisation --write         # rewrites README.md, results.json, pictures
python -m experiments.characterisation --read --write  # the page from results.json, nothing runs
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

from experiments.characterisation.measuring import Found, measure_all, table
from experiments.characterisation.sweeps import Setting, Sweep, sweeps
from experiments.course.charts import bars
from gpipe_hpc.bench.figures import PointResult
from gpipe_hpc.bench.running import measure

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results.json"
MODEL: Final = ("model=gpt", "data=synthetic", "comm.timeout_s=300")
LIMIT_S: Final = 300.0
INTRODUCTION: Final = """# The literature's characterisations, on one machine

**Purpose.** Measure how fast a step is by batch size, threads, processes and backend: the sweeps of
Jain et al. (CLUSTER 2019) and of Awan et al. (CCGrid 2019), whose machines were clusters of CPUs
and GPUs. Their figures are not compared, because they were not found.

**Method.** A small GPT (`model=gpt`: 4 blocks, 128 tokens), float32, in its own processes for every
point. Rounds go over all points in turn, so that other load affects all alike. A round's figure is
its median step, a line's the median over rounds; the spread is the slowest round minus the fastest
one, over the median.

    python -m experiments.characterisation --write                  # a quarter of an hour
    python -m experiments.characterisation --only threads --write   # keeps the other three

Bars are medians over rounds, the line over a bar is from the slowest round to the fastest.
"""


def _measured(setting: Setting, steps: int) -> PointResult:
    words = [*MODEL, *setting.words, f"bench.steps={steps}"]
    return measure(setting.point, words, LIMIT_S)


def page(made: Sequence[Sweep], found: Sequence[Sequence[Found]], told: Sequence[str]) -> str:
    """Return all tables, each with a description of its machine."""
    parts = []
    for sweep, lines, where in zip(made, found, told, strict=True):
        shown = (
            f"![{sweep.title}: the table below as bars]({picture_name(sweep)})\n\n{table(lines)}"
        )
        parts.append(f"## {sweep.title}\n\nAsked: {sweep.question}.\n\n{where}\n\n{shown}")
    return "\n\n".join(parts)


def picture_name(sweep: Sweep) -> str:
    """Return the file name of a sweep's plot."""
    return f"{sweep.name}.svg"


def picture(sweep: Sweep, found: Sequence[Found]) -> str:
    """Plot the samples per second of each point, with the range over rounds."""
    ends = {each.setting.name: each.samples_per_s_range for each in found if each.rounds_s}
    return bars(f"{sweep.title}: {sweep.question}", "samples/s", ends)


def _machine(rounds: int, steps: int) -> str:
    date = time.strftime("%Y-%m-%d")
    load = os.getloadavg()[0]
    told = (
        f"{rounds} rounds of {steps} steps, {os.cpu_count()} cores ({platform.machine()}), load "
        f"{load:.1f} at the start, torch {torch.__version__} on the CPU, {date}."
    )
    return fill(told, 100)


def _write(made: Sequence[Sweep], found: Sequence[Sequence[Found]], told: Sequence[str]) -> None:
    text = page(made, found, told)
    (HERE / "README.md").write_text(f"{INTRODUCTION}\n{text}\n", encoding="utf-8")
    results = {
        sweep.name: {"told": where, "rounds_s": {e.setting.name: e.rounds_s for e in lines}}
        for sweep, lines, where in zip(made, found, told, strict=True)
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for sweep, lines in zip(made, found, strict=True):
        (HERE / picture_name(sweep)).write_text(picture(sweep, lines), encoding="utf-8")


def on_file(made: Sequence[Sweep]) -> dict[str, tuple[list[Found], str]]:
    """Return stored results by sweep: the lines, and the description of the machine."""
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    return {
        sweep.name: (
            [
                Found(each, known[sweep.name]["rounds_s"].get(each.name, []))
                for each in sweep.settings
            ],
            known[sweep.name]["told"],
        )
        for sweep in made
        if sweep.name in known
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Sweep batch size, threads, processes, backend")
    parser.add_argument("--rounds", type=int, default=5, help="over all points (default 5)")
    parser.add_argument("--steps", type=int, default=10, help="of a point in a round (default 10)")
    parser.add_argument("--only", choices=[each.name for each in sweeps()], help="one sweep")
    parser.add_argument("--read", action="store_true", help="measure nothing, take results.json")
    parser.add_argument("--write", action="store_true", help="write page, results and pictures")
    words = parser.parse_args()
    if words.rounds < 1 or words.steps < 1:
        parser.error("--rounds, --steps: expected numbers from 1 up; correct them")
    known = on_file(sweeps())
    if words.read and not known:
        parser.error(f"--read: expected results in {RESULTS}; leave it out to measure")
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
