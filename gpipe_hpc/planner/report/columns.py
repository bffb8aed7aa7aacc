"""Text tables with aligned columns, and abbreviation of repeated items."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import NamedTuple


class RepeatedItems(NamedTuple):
    """A group of `period` items, starting at index `start`, that repeats `times` times."""

    start: int
    period: int
    times: int


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Format rows as lines of text; columns in `left` are left-aligned, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def compressed(names: Sequence[str]) -> str:
    """Join names in order, abbreviating repeats: ``Embedding, 4 x (Attention, MLP), Norm``."""
    parts: list[str] = []
    for start, period, times in fold_repeats(names, longest=8):
        group = ", ".join(names[start : start + period])
        wrapped = f"({group})" if period > 1 else group
        parts.append(f"{times} x {wrapped}" if times > 1 else group)
    return ", ".join(parts)


def fold_repeats(items: Sequence[Hashable], longest: int = 32) -> Iterator[RepeatedItems]:
    """Find repeated groups of up to `longest` items in a sequence; yield all items as groups."""
    numbers: dict[Hashable, int] = {}
    names = [numbers.setdefault(item, len(numbers)) for item in items]
    start = 0
    while start < len(names):
        repeats = {p: _repeats(names, start, p) for p in range(1, longest + 1)}
        repeated = {period: times for period, times in repeats.items() if times > 1}
        # The group that covers most items; the shorter of two that cover equally many.
        period = max(repeated, key=lambda p: (p * repeated[p], -p), default=1)
        yield RepeatedItems(start, period, repeated.get(period, 1))
        start += period * repeated.get(period, 1)


def _repeats(names: Sequence[int], start: int, period: int) -> int:
    end = start + period
    while end < len(names) and names[end] == names[end - period]:
        end += 1
    return max(1, (end - start) // period)
