"""Results as Markdown tables. Does not import torch."""

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.cells import SHORT
from benchmarks.figures import Figures, Row

TITLES: Final = {
    "A": "A: GPT",
    "B": "B: convolutions",
    "C": "C: wide layers",
    "A16": "A in bfloat16",
    "T": "T: tiny layers",
}
_COLUMNS: Final = (
    ("ours", ("ours", False)),
    ("torch", ("torch", False)),
    ("DDP", ("ddp", False)),
    ("ours, recomputing", ("ours", True)),
    ("torch, recomputing", ("torch", True)),
)

_HEAD = (
    "contestant",
    "schedule",
    "recompute",
    "ms",
    "quartiles",
    "steps",
    "/ limit",
    "/ floor",
    "CPU s",
    "peak MB",
)


def block_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of one block's table."""
    floor = next((row.median_s for row in rows if row.contestant == "floor"), None)
    yield f"| {' | '.join(_HEAD)} |"
    yield "|" + "---|" * 3 + "---:|" * (len(_HEAD) - 3)
    for row in rows:
        yield f"| {' | '.join(_cells(row, floor))} |"


def _cells(row: Row, floor_s: float | None) -> list[str]:
    named = [row.contestant, row.variant, row.recompute]
    if row.median_s is None:
        short = row.failed.split("; its logs")[0].replace("|", "/").replace("\n", " ")
        return [*named, f"— ({short[:160]})", *[""] * (len(_HEAD) - 4)]
    return [
        *named,
        f"{'' if row.num_clean else '~'}{milliseconds(row.median_s)}",
        "-".join(milliseconds(each) for each in row.quartiles_s) if row.quartiles_s else "",
        f"{row.num_clean}/{row.num_visits}",
        f"{row.median_s / row.limit_s:.3f}" if row.limit_s else "",
        f"{row.median_s / floor_s:.3f}" if floor_s else "",
        f"{row.cpu_s:.3g}" if row.cpu_s is not None else "",
        " / ".join(f"{each / 1e6:.0f}" for each in row.peak_bytes),
    ]


def milliseconds(seconds: float) -> str:
    """Return milliseconds with at least three digits."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def short_table(figures: Figures) -> str:
    """Return one row per model of the short benchmark, with the fastest schedule of each column."""
    lines = [
        f"{figures.machine}, {figures.versions['torch']}; {figures.date}; {SHORT} micro-batches.",
        "",
        f"| model | floor ms | {' | '.join(name for name, _ in _COLUMNS)} |",
        "|---|" + "---:|" * (1 + len(_COLUMNS)),
    ]
    for workload, title in TITLES.items():
        where = f"{workload} M={SHORT} short"
        floor = figures.find(where, "floor local")
        if floor is None or not floor.median_s:
            continue
        cells = [
            _fastest(figures.best(where, who, recompute=again), floor.median_s)
            for _, (who, again) in _COLUMNS
        ]
        lines.append(f"| {title} | {milliseconds(floor.median_s)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _fastest(row: Row | None, floor_s: float) -> str:
    """Return the time over the floor and the schedule's name; empty if nothing was measured."""
    return f"{over_floor(row, floor_s)} {row.variant}" if row and row.median_s else ""


def over_floor(row: Row, floor_s: float) -> str:
    """Return the time over the floor, with ± half the interquartile range.

    ~ marks medians of fewer than three undisturbed steps.
    """
    assert row.median_s, "the caller leaves out rows without a time"
    if not row.is_sound:
        return f"~{row.median_s / floor_s:.2f}"
    return f"{row.median_s / floor_s:.2f} ±{row.spread * row.median_s / floor_s / 2:.2f}"


def insert(text: str, name: str, new: str) -> str:
    """Replace the text between a pair of marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, _, rest = text.partition(begin)
    _, mark, tail = rest.partition(end)
    return f"{head}{begin}\n{new}\n{mark}{tail}" if mark else text
