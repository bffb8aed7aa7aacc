"""Results as Markdown tables. Does not import torch."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.figures import Figures, Row

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
    "tensors MB",
)


def markdown(figures: Figures) -> str:
    """Return a table for each block, sorted by time within a contestant."""
    of_torch = sorted({each for each in figures.versions.values() if each.startswith("torch ")})
    others = (f"{n} {v}" for n, v in sorted(figures.versions.items()) if v not in of_torch)
    lines = [f"{figures.machine}; {', '.join([*of_torch, *others])}; {figures.date}."]
    for name, rows in figures.blocks.items():
        weighed = figures.extras.get("tensors", {}).get(name, {})
        lines += ["", f"**{name}**", "", *block_lines(rows, weighed)]
    return "\n".join(lines) + "\n"


def block_lines(
    rows: Sequence[Row], weighed: Mapping[str, Sequence[int]] | None = None
) -> Iterator[str]:
    """Yield the lines of one block's table.

    `weighed` maps names of rows to bytes of tensors; if empty, the column is omitted.
    """
    floor = next((row.median_s for row in rows if row.contestant == "floor"), None)
    num_columns = len(_HEAD) if weighed else len(_HEAD) - 1
    yield f"| {' | '.join(_HEAD[:num_columns])} |"
    yield "|" + "---|" * 3 + "---:|" * (num_columns - 3)
    for row in rows:
        tensors = (weighed or {}).get(row.name, ())
        yield f"| {' | '.join(_cells(row, floor, tensors)[:num_columns])} |"


def _cells(row: Row, floor_s: float | None, tensors: Sequence[int]) -> list[str]:
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
        " / ".join(f"{each / 1e6:.0f}" for each in tensors),
    ]


def milliseconds(seconds: float) -> str:
    """Return milliseconds with at least three digits."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
