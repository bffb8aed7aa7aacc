"""The tables of this folder's README, from the results."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.cells import FULL, SHORT
from benchmarks.figures import Figures, Row
from benchmarks.peers.claims import judge, table
from benchmarks.peers.grid import OTHERS
from benchmarks.table import TITLES, insert, over_floor

_LONG_MICROBATCHES: Final = (8, 16)  # figures.json has 1, 2 and 4 too


def write(figures: Figures, folder: Path) -> str:
    """Write the tables of a folder's README; return the table of claims."""
    claims = table(judge(figures))
    readme = folder / "README.md"
    if readme.exists():
        text = insert(readme.read_text("utf-8"), "claims", claims)
        readme.write_text(insert(text, "table", long_tables(figures)), "utf-8")
    return claims


def long_tables(figures: Figures) -> str:
    """Return step time and memory of each schedule, with a column for each model."""
    of_torch = sorted({each for each in figures.versions.values() if each.startswith("torch ")})
    others = (f"{n} {v}" for n, v in sorted(figures.versions.items()) if v not in of_torch)
    lines = [f"{figures.machine}; {', '.join([*of_torch, *others])}; {figures.date}."]
    for count in _LONG_MICROBATCHES:
        lines += ["", f"**Step time over the floor, {count} micro-batches**", ""]
        lines += _by_model(figures, count, list(TITLES), over_floor)
    count, models = SHORT, [each for each in TITLES if each != "T"]
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
    for part in (FULL, OTHERS) if count == SHORT else (FULL,):
        for model in models:
            where = f"{model} M={count} {part}"
            floor = figures.find(where, "floor local")
            for row in figures.blocks.get(where, []):
                # Earlier runs also measured other schedules with recomputation.
                is_shown = part == FULL or row.recompute == "never"
                if is_shown and floor and floor.median_s and row.median_s:
                    found.setdefault(row.name, {}).setdefault(model, cell(row, floor.median_s))
    lines = [
        f"| | {' | '.join(TITLES[each] for each in models)} |",
        "|---|" + "---:|" * len(models),
    ]
    for name, cells in found.items():
        lines.append(f"| {name} | {' | '.join(cells.get(each, '') for each in models)} |")
    return lines


def _peak(row: Row) -> str:
    return f"{max(row.peak_bytes) / 1e6:.0f}" if row.peak_bytes else ""
