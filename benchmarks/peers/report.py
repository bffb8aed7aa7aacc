"""The table of the README and the plots, from the results."""

from pathlib import Path

from benchmarks.figures import Figures, Row
from benchmarks.peers.claims import best, block, judge, table
from benchmarks.peers.grid import MICROBATCHES
from benchmarks.plot import Panel, draw_panels
from benchmarks.table import markdown, milliseconds

_TITLES = {
    "A": "A: GPT",
    "B": "B: convolutions",
    "C": "C: wide layers",
    "A16": "A in bfloat16",
    "T": "T: tiny layers",
}
_LINES = (
    ("ours, best schedule", "ours", None),
    ("ours, GPipe", "ours", "gpipe"),
    ("ours, 1F1B", "ours", "one_f_one_b"),
    ("torch, best schedule", "torch", None),
    ("torch, GPipe", "torch", "GPipe"),
    ("torch, 1F1B", "torch", "1F1B"),
    ("DeepSpeed, 1F1B", "deepspeed", None),
    ("DDP", "ddp", None),
)
_SHORT_MICROBATCHES = (8, 16)
_SHORT = (
    ("ours", ("ours", False)),
    ("torch", ("torch", False)),
    ("DeepSpeed", ("deepspeed", False)),
    ("DDP", ("ddp", False)),
    ("ours, recomputing", ("ours", True)),
    ("torch, recomputing", ("torch", True)),
)


def write(figures: Figures, folder: Path) -> str:
    """Write the README tables and both plots; return the table of claims."""
    claims = table(judge(figures))
    (folder / "peers.svg").write_text(peers_plot(figures), "utf-8")
    if figures.extras.get("growth"):
        (folder / "growth.svg").write_text(growth_plot(figures), "utf-8")
    readme = folder / "README.md"
    if readme.exists():
        text = readme.read_text("utf-8")
        text = insert(text, "claims", claims)
        text = insert(text, "table", markdown(figures))
        readme.write_text(text, "utf-8")
    return claims


def write_front_page(figures: Figures, readme: Path) -> None:
    """Write the short table into the project's README."""
    text = insert(readme.read_text("utf-8"), "peers", short_table(figures))
    readme.write_text(text, "utf-8")


def short_table(figures: Figures) -> str:
    """Return a line per model at many micro-batches: the best of each contestant."""
    lines = [
        f"{figures.machine}; {figures.date}.",
        "",
        "| model | M | floor ms | " + " | ".join(name for name, _ in _SHORT) + " |",
        "|---|---:|---:|" + "---:|" * len(_SHORT),
    ]
    for workload, title in _TITLES.items():
        for count in _SHORT_MICROBATCHES:
            where = block(workload, count)
            floor = figures.find(where, "floor local")
            if floor is None or not floor.median_s:
                continue
            cells = [
                _short_cell(best(figures, where, who, recompute=again), floor.median_s)
                for _, (who, again) in _SHORT
            ]
            floor_ms = milliseconds(floor.median_s)
            lines.append(f"| {title} | {count} | {floor_ms} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short_cell(row: Row | None, floor_s: float) -> str:
    """Return schedule, time over the floor and peak memory; ~ marks few undisturbed steps."""
    if row is None or not row.median_s:
        return ""
    value = f"{row.median_s / floor_s:.2f}"
    if row.is_sound:
        value += f" ±{row.spread * row.median_s / floor_s / 2:.2f}"
    else:
        value = f"~{value}"
    peak = f", {max(row.peak_bytes) / 1e6:.0f} MB" if row.peak_bytes else ""
    return f"{row.variant} {value}{peak}"


def insert(text: str, name: str, new: str) -> str:
    """Replace the text between a pair of marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, _, rest = text.partition(begin)
    _, mark, tail = rest.partition(end)
    return f"{head}{begin}\n{new}\n{mark}{tail}" if mark else text


def _row(figures: Figures, where: str, contestant: str, variant: str | None) -> Row | None:
    if variant is None:
        return best(figures, where, contestant)
    return figures.find(where, f"{contestant} {variant}")


def peers_plot(figures: Figures) -> str:
    """Plot step times over the floor of the same block; for T, milliseconds per micro-batch."""
    panels = []
    for workload, title in _TITLES.items():
        series: dict[str, list[tuple[float, float]]] = {}
        for name, contestant, variant in _LINES:
            for count in MICROBATCHES:
                where = block(workload, count)
                row = _row(figures, where, contestant, variant)
                floor = figures.find(where, "floor local")
                if row is None or floor is None or not row.median_s or not floor.median_s:
                    continue
                share = row.median_s / floor.median_s
                value = 1e3 * row.median_s / count if workload == "T" else share
                series.setdefault(name, []).append((count, value))
        unit = "ms a micro-batch" if workload == "T" else "step time / floor"
        panels.append(Panel(title, series, unit))
    return draw_panels(panels, title="Step times of two ranks: 1 = nothing sent, nobody waits")


def growth_plot(figures: Figures) -> str:
    """Plot step times over micro-batches for each number of ranks, with the fit."""
    measured: dict[str, list[tuple[float, float]]] = {}
    fitted: dict[str, list[tuple[float, float]]] = {}
    for point in figures.extras["growth"]:
        count = point["microbatches"]
        name = f"{point['ranks']:g} rank{'' if point['ranks'] == 1 else 's'}"
        measured.setdefault(name, []).append((count, 1e3 * point["step_s"]))
        if "fit_s" in point:
            fitted.setdefault(name, []).append((count, 1e3 * point["fit_s"]))
    panel = Panel("Model T, 1F1B", measured, "ms a step", is_log=True, dashed=fitted)
    return draw_panels([panel], title="Growth; dashed: work + messages")
