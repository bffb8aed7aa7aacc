"""The tables of the front page and of this folder's README, from the results."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.cells import FULL
from benchmarks.figures import Figures, Row
from benchmarks.peers.claims import best, block, judge, table
from benchmarks.peers.grid import OTHERS
from benchmarks.table import milliseconds

_TITLES: Final = {
    "A": "A: GPT",
    "B": "B: convolutions",
    "C": "C: wide layers",
    "A16": "A in bfloat16",
    "T": "T: tiny layers",
}
_SHORT_BLOCKS: Final = (("A", 8), ("A", 16), ("B", 8), ("C", 8), ("A16", 8), ("T", 8))
_SHORT_MICROBATCHES: Final = 8  # of rows that do not name a number
_SHORT: Final = (
    ("ours", ("ours", False)),
    ("torch", ("torch", False)),
    ("DeepSpeed", ("deepspeed", False)),
    ("DDP", ("ddp", False)),
    ("ours, recomputing", ("ours", True)),
    ("torch, recomputing", ("torch", True)),
)
_LONG_MICROBATCHES: Final = (8, 16)  # figures.json has 1, 2 and 4 too


def write(figures: Figures, folder: Path) -> str:
    """Write the tables of a folder's README; return the table of claims."""
    claims = table(judge(figures))
    readme = folder / "README.md"
    if readme.exists():
        text = insert(readme.read_text("utf-8"), "claims", claims)
        readme.write_text(insert(text, "table", long_tables(figures)), "utf-8")
    return claims


def write_front_page(figures: Figures, readme: Path) -> None:
    """Write the short table into the project's README."""
    text = insert(readme.read_text("utf-8"), "peers", short_table(figures))
    readme.write_text(text, "utf-8")


def short_table(figures: Figures) -> str:
    """Return one row per model with the fastest schedule of each contestant."""
    lines = [
        f"{figures.machine}; {figures.date}; {_SHORT_MICROBATCHES} micro-batches.",
        "",
        f"| model | floor ms | {' | '.join(name for name, _ in _SHORT)} |",
        "|---|" + "---:|" * (1 + len(_SHORT)),
    ]
    for workload, count in _SHORT_BLOCKS:
        where = block(workload, count)
        floor = figures.find(where, "floor local")
        if floor is None or not floor.median_s:
            continue
        cells = [
            _fastest(best(figures, where, who, recompute=again), floor.median_s)
            for _, (who, again) in _SHORT
        ]
        few = "" if count == _SHORT_MICROBATCHES else f", {count} micro-batches"
        title = f"{_TITLES[workload]}{few}"
        lines.append(f"| {title} | {milliseconds(floor.median_s)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def long_tables(figures: Figures) -> str:
    """Return step time and memory of each schedule, with a column for each model."""
    of_torch = sorted({each for each in figures.versions.values() if each.startswith("torch ")})
    others = (f"{n} {v}" for n, v in sorted(figures.versions.items()) if v not in of_torch)
    lines = [f"{figures.machine}; {', '.join([*of_torch, *others])}; {figures.date}."]
    for count in _LONG_MICROBATCHES:
        lines += ["", f"**Step time over the floor, {count} micro-batches**", ""]
        lines += _by_model(figures, count, list(_TITLES), _over_floor)
    count, models = _SHORT_MICROBATCHES, [each for each in _TITLES if each != "T"]
    lines += ["", f"**Peak memory of the fullest rank, MB, {count} micro-batches**", ""]
    lines += _by_model(figures, count, models, lambda row, _: _peak(row))
    return "\n".join(lines) + "\n"


def _by_model(
    figures: Figures, count: int, models: list[str], cell: Callable[[Row, float], str]
) -> list[str]:
    """Return a table of `cell`, which is called with a row and the floor of its block.

    With 8 micro-batches it contains the schedules that no claim is about, without recomputation.
    """
    found: dict[str, dict[str, str]] = {}
    for part in (FULL, OTHERS) if count == _SHORT_MICROBATCHES else (FULL,):
        for model in models:
            where = f"{model} M={count} {part}"
            floor = figures.find(where, "floor local")
            for row in figures.blocks.get(where, []):
                # Earlier runs also measured other schedules with recomputation.
                is_shown = part == FULL or row.recompute == "never"
                if is_shown and floor and floor.median_s and row.median_s:
                    found.setdefault(row.name, {}).setdefault(model, cell(row, floor.median_s))
    lines = [
        f"| | {' | '.join(_TITLES[each] for each in models)} |",
        "|---|" + "---:|" * len(models),
    ]
    for name, cells in found.items():
        lines.append(f"| {name} | {' | '.join(cells.get(each, '') for each in models)} |")
    return lines


def _fastest(row: Row | None, floor_s: float) -> str:
    """Return the time over the floor and the schedule's name; empty if nothing was measured."""
    return f"{_over_floor(row, floor_s)} {row.variant}" if row and row.median_s else ""


def _over_floor(row: Row, floor_s: float) -> str:
    """Return the time over the floor, with ± half the interquartile range.

    ~ marks medians of fewer than three undisturbed steps.
    """
    assert row.median_s, "the caller leaves out rows without a time"
    if not row.is_sound:
        return f"~{row.median_s / floor_s:.2f}"
    return f"{row.median_s / floor_s:.2f} ±{row.spread * row.median_s / floor_s / 2:.2f}"


def _peak(row: Row) -> str:
    return f"{max(row.peak_bytes) / 1e6:.0f}" if row.peak_bytes else ""


def insert(text: str, name: str, new: str) -> str:
    """Replace the text between a pair of marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, _, rest = text.partition(begin)
    _, mark, tail = rest.partition(end)
    return f"{head}{begin}\n{new}\n{mark}{tail}" if mark else text
