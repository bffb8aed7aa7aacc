"""Results as Markdown tables. Does not import torch."""

from collections.abc import Iterator, Sequence

from benchmarks.figures import Row

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
