"""Results of a benchmark run, by cell, and their file. Does not import torch."""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from benchmarks.cells import OURS_OF_TORCH, RANKS, Block, Cell
from benchmarks.limits import LayerTimes, Limit, limit_of
from benchmarks.rounds import Measured
from gpipe_hpc.errors import DataError
from gpipe_hpc.schedule import Schedule, add_recompute, build, from_text

# With fewer undisturbed steps than these a median has no spread.
FEWEST: Final = 3
_DIGITS: Final = 5


@dataclass(frozen=True)
class Row:
    """Results of a cell: seconds per step, and bytes of one rank above an idle process.

    `quartiles_s` are those of the undisturbed visits, `num_clean` of `num_visits`. If none is
    undisturbed, `median_s` is the shortest time of all. `limit_s` is the lower bound for the
    schedule.
    """

    contestant: str
    variant: str
    recompute: str
    num_clean: int = 0
    num_visits: int = 0
    median_s: float | None = None
    quartiles_s: tuple[float, float] | None = None
    cpu_s: float | None = None
    peak_bytes: tuple[int, ...] = ()
    gradient_error: float | None = None
    limit_s: float | None = None
    bubble: float | None = None
    failed: str = ""

    @property
    def name(self) -> str:
        """Return the name of the cell within its block."""
        again = "" if self.recompute == "never" else f" recompute={self.recompute}"
        return f"{self.contestant} {self.variant}{again}"

    @property
    def is_sound(self) -> bool:
        """Return whether there are enough steps for a median with a spread."""
        return self.median_s is not None and self.num_clean >= FEWEST

    @property
    def spread(self) -> float:
        """Return the interquartile range divided by the median."""
        if not self.quartiles_s or not self.median_s:
            return 0.0
        return (self.quartiles_s[1] - self.quartiles_s[0]) / self.median_s


@dataclass
class Figures:
    """Results of a run by block, with a description of the machine."""

    machine: str = ""
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, list[Row]] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    def find(self, block: str, name: str) -> Row | None:
        """Return the row of a cell if it has a time."""
        for row in self.blocks.get(block, []):
            if row.name == name and row.median_s is not None:
                return row
        return None

    def best(
        self,
        block: str,
        contestant: str,
        *,
        recompute: bool = False,
        most_bytes: float = math.inf,
    ) -> Row | None:
        """Return a contestant's fastest row of a block, with or without recomputation.

        Only rows whose fullest rank needs at most `most_bytes` count. Rows with few undisturbed
        steps are used only if there are no others, because the fastest of them is a matter of
        chance.
        """
        rows = [
            row
            for row in self.blocks.get(block, [])
            if row.contestant == contestant
            and row.median_s is not None
            and (row.recompute != "never") == recompute
            and max(row.peak_bytes or (math.inf,)) <= most_bytes
        ]
        sound = [row for row in rows if row.is_sound]
        return min(sound or rows, key=lambda row: row.median_s or math.inf, default=None)

    def save(self, path: Path) -> None:
        """Write the results; a concurrent reader sees the old or the new file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        aside.write_text(_compact(asdict(self)), "utf-8")
        os.replace(aside, path)


def _compact(figures: dict[str, Any]) -> str:
    """Return JSON with one cell per line and only significant digits."""
    blocks, extras = figures.pop("blocks"), figures.pop("extras")
    head = [f" {json.dumps(name)}: {json.dumps(_rounded(each))}" for name, each in figures.items()]
    weighed = _lines({name: _rounded(each) for name, each in extras.items()})
    cells = _lines({name: [_rounded(_told(row)) for row in rows] for name, rows in blocks.items()})
    parts = [*head, f' "extras": {weighed}', f' "blocks": {cells}']
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(groups: Mapping[str, Any]) -> str:
    """Return a JSON object of lists and objects with one member per line."""
    texts = []
    for name, group in groups.items():
        if isinstance(group, Mapping):
            members = [f"{json.dumps(key)}: {json.dumps(each)}" for key, each in group.items()]
            begin, end = "{", "}"
        else:
            members, begin, end = [json.dumps(each) for each in group], "[", "]"
        inner = ",\n".join(f"   {member}" for member in members)
        texts.append(f"  {json.dumps(name)}: {begin}\n{inner}\n  {end}")
    return "{\n" + ",\n".join(texts) + "\n }"


def _told(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove fields that have their default value."""
    usual = {each.name: each.default for each in fields(Row)}
    return {name: value for name, value in row.items() if value != usual[name]}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def load_figures(path: Path) -> Figures:
    """Load results; raises DataError if the file has another format."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        blocks = {name: [_row(each) for each in rows] for name, rows in raw.pop("blocks").items()}
        return Figures(**raw, blocks=blocks)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path}: no figures of a benchmark, expected what benchmarks writes, got "
            f"{type(error).__name__}: {error}; remove the file and measure again"
        ) from error


def _row(raw: Mapping[str, Any]) -> Row:
    names = {each.name for each in fields(Row)}
    tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()
    }
    if set(tuples) - names:
        raise KeyError(", ".join(sorted(set(tuples) - names)))
    return Row(**tuples)


def rows_of(block: Block, measured: Sequence[Measured]) -> list[Row]:
    """Return the rows of a block's cells, with limits if its floor was measured."""
    floor = next((m for m in measured if m.cell.contestant == "floor" and m.samples), None)
    return [_figures_of(each, floor) for each in measured]


def _figures_of(each: Measured, floor: Measured | None) -> Row:
    cell = each.cell
    named = (cell.contestant, cell.variant, cell.recompute)
    if each.failed or not each.samples:
        return Row(
            *named,
            gradient_error=each.gradient_error,
            failed=each.failed or "no time was left for it",
        )
    steps = sorted(sample.step_s for sample in each.clean)
    limit = _limit(each, floor)
    counted = each.clean or each.samples
    return Row(
        *named,
        num_clean=len(steps),
        num_visits=len(each.samples),
        median_s=median_step(each),
        quartiles_s=quartiles(steps) if steps else None,
        cpu_s=statistics.median(sample.cpu_s for sample in counted),
        peak_bytes=each.peak_bytes,
        gradient_error=each.gradient_error,
        limit_s=limit.step_s if limit else None,
        bubble=limit.bubble if limit else None,
    )


def median_step(each: Measured) -> float:
    """Return the median of undisturbed visits, or the shortest visit if there is none."""
    if each.clean:
        return statistics.median(sample.step_s for sample in each.clean)
    return min(sample.step_s for sample in each.samples)


def median_ranks(each: Measured) -> list[float]:
    """Return each rank's median over undisturbed visits, or its shortest time if there is none."""
    visits = each.clean or [min(each.samples, key=lambda sample: sample.step_s)]
    return [statistics.median(times) for times in zip(*(v.ranks_s for v in visits), strict=True)]


def floor_ranks(floor: Measured) -> list[float]:
    """Return the time of each rank in the floor, with the slowest as long as the floor's step.

    A step lasts as long as its slowest rank, and noise makes its median longer than the median of
    any rank. Limits computed from ranks alone would be below the floor, which cannot be reached.
    """
    ranks_s = median_ranks(floor)
    return [rank_s * median_step(floor) / max(ranks_s) for rank_s in ranks_s]


def quartiles(steps: Sequence[float]) -> tuple[float, float]:
    """Return first and third quartile, or minimum and maximum of few values."""
    if len(steps) < 4:
        return min(steps), max(steps)
    first, _, third = statistics.quantiles(steps, n=4, method="inclusive")
    return first, third


def _limit(each: Measured, floor: Measured | None) -> Limit | None:
    """Return the lower bound of a cell that runs a table."""
    schedule = table_of(each.cell, each.notes)
    if floor is None or floor.failed or schedule is None:
        return None
    times = LayerTimes.of([note["layers"] for note in floor.notes])
    floor_counts = floor.notes[0]["counts"]
    return limit_of(schedule, each.notes[0]["counts"], times, floor_ranks(floor), floor_counts)


def table_of(cell: Cell, notes: Sequence[Mapping[str, Any]]) -> Schedule | None:
    """Return the table that a cell runs, given by itself or by its schedule, or None."""
    if notes and "table" in notes[0]:
        table = from_text(notes[0]["table"], cell.variant)
        is_ours = cell.contestant == "ours"
        return table if is_ours or cell.recompute == "never" else add_recompute(table, "always")
    known = notes[0].get("schedule") if notes else None
    known = known or (OURS_OF_TORCH.get(cell.variant) if cell.contestant == "torch" else None)
    if known is None:
        return None
    recompute = "never" if cell.recompute == "never" else "always"
    return build(known, ranks=RANKS, microbatches=cell.microbatches, recompute=recompute)
