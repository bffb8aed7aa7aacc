"""The rows as a table and a picture."""

from collections.abc import Mapping, Sequence

from experiments.outer.slow_link.plot import Curve, draw
from experiments.outer.slow_link.rows import BASE, LAYOUTS, METHODS, ROWS, Row
from experiments.outer.slow_link.running import Found


def seconds_to(validation: Curve, target: float) -> float | None:
    """Return the seconds at the first validation that is as good as `target`; None without."""
    return next((seconds for seconds, loss in validation if loss <= target), None)


def table(found: Mapping[str, Found], base: str = BASE) -> str:
    """Return a line for each row; `base`: the one whose last loss the others are timed to."""
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


def picture(found: Mapping[str, Found], title: str) -> str:
    """Return an SVG: validation loss over seconds of training, methods beside layouts."""
    panels = {
        what: curves
        for what, rows in (
            ("ways to combine", METHODS),
            ("ways to lay out", (ROWS[BASE], *LAYOUTS)),
        )
        if (curves := _curves(found, rows))
    }
    return draw(panels, "seconds of training", "validation loss, nats a byte", title)


def _curves(found: Mapping[str, Found], rows: Sequence[Row]) -> dict[str, Curve]:
    return {
        row.name: found[row.name].validation
        for row in rows
        if row.name in found and found[row.name].validation
    }
