"""The results as a table in Markdown."""

from collections.abc import Mapping

from experiments.outer.slow_link.rows import BASE, ROWS
from experiments.outer.slow_link.running import Curve, RowResult


def seconds_to(validation: Curve, target: float) -> float | None:
    """Return the seconds of the first validation loss of at most `target`, or None."""
    return next((seconds for seconds, loss in validation if loss <= target), None)


def table(found: Mapping[str, RowResult], base: str = BASE) -> str:
    """Return one line per row; the seconds are those to the last validation loss of `base`."""
    lines = [
        "| row | ranks | steps/s | MB a step over the link | validation loss at the end | "
        f"seconds to {base}'s last loss | of its time |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    ends = found[base].validation if base in found else []
    target_s, target = ends[-1] if ends else (None, None)
    for name, each in found.items():
        row = ROWS[name]
        reached = None if target is None else seconds_to(each.validation, target)
        share = None if reached is None or not target_s else reached / target_s
        cells = [
            f"{name}: {row.what}",
            str(sum(map(len, row.places))),
            f"{each.steps_per_s:.2f}",
            f"{each.step_bytes / 1e6:.3f}",
            f"{each.validation[-1][1]:.3f}" if each.validation else "",
            "" if target is None else "not reached" if reached is None else f"{reached:.1f}",
            "" if share is None else f"{share:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
