"""Measure all points of all sweeps in rounds."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from experiments.characterisation.sweeps import Setting, Sweep
from gpipe_hpc.bench.figures import PointResult


@dataclass
class PointRounds:
    """The median step of each round at one point, in seconds, and the reasons of failed rounds."""

    setting: Setting
    rounds_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def samples_per_s(self) -> float:
        """Return samples per second, from the median over rounds."""
        return self.setting.point.batch_size / median(self.rounds_s)

    @property
    def spread(self) -> float:
        """Return the range of the rounds divided by their median."""
        return (max(self.rounds_s) - min(self.rounds_s)) / median(self.rounds_s)


def measure_all(
    sweeps: Iterable[Sweep], rounds: int, measure: Callable[[Setting], PointResult]
) -> list[list[PointRounds]]:
    """Measure every point once per round, so that other load on the machine affects all equally.

    Points that are in several sweeps are measured for each of them.
    """
    found = [[PointRounds(setting) for setting in sweep.settings] for sweep in sweeps]
    for number in range(rounds):
        for each in (one for sweep in found for one in sweep):
            told = measure(each.setting)
            if told.steps_s:
                each.rounds_s.append(told.median_s)
            else:
                each.failures.append(told.failed)
            took = f"{1e3 * told.median_s:.4g} ms" if told.steps_s else told.failed
            line = f"round {number + 1}/{rounds}, {each.setting.name}: {took}"
            print(line, file=sys.stderr, flush=True)
    return found


def table(found: Sequence[PointRounds]) -> str:
    """Return a sweep as Markdown; speed-ups are relative to its first line that ran."""
    lines = ["| | ms a step | rounds | spread | samples/s | speed-up |", "|---|" + "---:|" * 5]
    first = next((each.samples_per_s for each in found if each.rounds_s), None)
    return "\n".join([*lines, *(_line(each, first) for each in found)])


def _line(each: PointRounds, first: float | None) -> str:
    if not each.rounds_s or first is None:
        why = (each.failures or ["was not run"])[0].replace("|", "/")
        return f"| {each.setting.name} | none: {why} | 0 | | | |"
    cells = [
        each.setting.name,
        f"{1e3 * median(each.rounds_s):.4g}",
        str(len(each.rounds_s)),
        f"{100 * each.spread:.0f} %",
        f"{each.samples_per_s:.4g}",
        f"{each.samples_per_s / first:.2f}",
    ]
    return f"| {' | '.join(cells)} |"
