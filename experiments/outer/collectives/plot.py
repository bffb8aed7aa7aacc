"""Times over sizes: what was measured, the closed forms, and where the fastest changes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.outer.collectives.costs import FORMS, Link
from experiments.outer.collectives.figures import (
    Found,
    computed_crossovers,
    crossover_lines,
    measured_crossovers,
    size_text,
)
from experiments.outer.collectives.menu import BACKEND
from experiments.outer.collectives.picture import COLOURS, INK, MARKERS, new_figure, save, settings
from experiments.outer.collectives.tuning import Crossover, crossovers, predicted


def draw(found: Sequence[Found], path: Path) -> None:
    """Draw a row for each number of ranks and a column for each collective.

    Points are measured, dashed lines are closed forms over the fitted link, the backend's own is in
    the colour of the text. Vertical lines are crossovers: dotted computed, solid measured.
    """
    collectives = found[0].collectives
    with settings():
        figure = new_figure(4.4 * len(collectives), 4.0 * len(found))
        grid = figure.subplots(len(found), len(collectives), squeeze=False)
        for line, each in zip(grid, found, strict=True):
            for axes, collective in zip(line, collectives, strict=True):
                _draw_one(axes, each, collective)
        save(figure, path, "Times of collectives over sizes", _described(found))


def draw_predicted(
    collectives: Sequence[str],
    ranks: Sequence[int],
    link: Link,
    g: int,
    sizes: Sequence[int],
    path: Path,
) -> None:
    """Draw closed forms alone, each pipelined one with its best blocks, and their crossovers."""
    lines = [f"Closed forms over {link}, {g} ranks a host: milliseconds over bytes."]
    with settings():
        figure = new_figure(4.4 * len(collectives), 4.0 * len(ranks))
        grid = figure.subplots(len(ranks), len(collectives), squeeze=False)
        for line, n in zip(grid, ranks, strict=True):
            for axes, collective in zip(line, collectives, strict=True):
                for number, name in enumerate(FORMS[collective]):
                    took = [predicted(collective, name, link, n, b, g).seconds for b in sizes]
                    axes.plot(
                        *(sizes, [1e3 * each for each in took]),
                        marker=MARKERS[number],
                        markersize=3,
                        linewidth=0.9,
                        color=COLOURS[number],
                        label=name,
                    )
                crossed = crossovers(collective, link, n, (sizes[0], sizes[-1]), g=g)
                logarithmic(axes)
                mark(axes, crossed, ":", top=True)
                axes.set_title(f"{collective.replace('_', '-')}, {n} ranks")
                axes.set_ylabel("ms, closed form")
                axes.legend(fontsize="x-small")
                lines += [
                    f"{collective} on {n} ranks: from {size_text(each.num_bytes)} on {each.after} "
                    f"in place of {each.before}."
                    for each in crossed
                ]
        save(figure, path, "Closed forms of collectives over sizes", "\n".join(lines))


def _draw_one(axes: Any, found: Found, collective: str) -> None:
    for number, name in enumerate((BACKEND, *FORMS[collective])):
        timings = found.along(collective, name)
        if not timings:
            continue
        colour = INK if name == BACKEND else COLOURS[number - 1]
        sizes = [timing.num_bytes for timing in timings]
        measured = [1e3 * timing.median_s for timing in timings]
        style = {"marker": MARKERS[number], "markersize": 4, "linewidth": 0.9, "color": colour}
        axes.plot(sizes, measured, label=name, **style)
        forms = [(t.num_bytes, 1e3 * t.form_s) for t in timings if t.form_s is not None]
        if forms:
            axes.plot(*zip(*forms, strict=True), linestyle="--", linewidth=0.8, color=colour)
    logarithmic(axes)
    mark(axes, computed_crossovers(found, collective), ":", top=True)
    mark(axes, measured_crossovers(found, collective), "-", top=False)
    axes.set_title(f"{collective.replace('_', '-')}, {found.ranks} ranks")
    axes.set_ylabel("ms (dashed: closed form)")
    axes.legend(fontsize="x-small")


def logarithmic(axes: Any) -> None:
    """Let both axes be logarithmic, sizes in bytes with their units."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()  # they were most of the file
    axes.xaxis.set_major_formatter(lambda size, _: size_text(size))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlabel("size")
    axes.grid(alpha=0.3)


def mark(axes: Any, crossings: Sequence[Crossover], style: str, *, top: bool) -> None:
    """Mark crossovers by vertical lines with their sizes."""
    for cross in crossings:
        axes.axvline(cross.num_bytes, linestyle=style, linewidth=0.7, color=INK, alpha=0.7)
        axes.annotate(
            size_text(cross.num_bytes),
            (cross.num_bytes, 0.99 if top else 0.01),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top" if top else "bottom",
            ha="right",
            fontsize="x-small",
        )


def _described(found: Sequence[Found]) -> str:
    """Return the fastest at the ends of each panel, and the crossovers."""
    lines = [
        "One panel for each collective and number of ranks: milliseconds over bytes, both "
        "logarithmic. Vertical lines are crossovers, dotted if computed, solid if measured."
    ]
    for each in found:
        for collective in each.collectives:
            curves = [c for n in (BACKEND, *FORMS[collective]) if (c := each.along(collective, n))]
            ends = [min((c[i] for c in curves), key=lambda t: t.median_s) for i in (0, -1)]
            lines.append(
                f"{collective} on {each.ranks} ranks: fastest are "
                + " and ".join(
                    f"{t.algorithm} with {1e3 * t.median_s:.3g} ms at {size_text(t.num_bytes)}"
                    for t in ends
                )
                + "."
            )
    return " ".join(lines) + "\n" + crossover_lines(found)
