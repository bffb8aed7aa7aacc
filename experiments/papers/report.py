"""Tables of papers as Markdown."""

from collections.abc import Sequence
from textwrap import fill
from typing import Final, NamedTuple

from experiments.papers.table import WITHIN, Figure, Paper, Table

_COLUMNS: Final = 115
MOST_ROWS: Final = 12


class Outcome(NamedTuple):
    """A paper and its tables: those that must be equal, and simulated ones."""

    paper: Paper
    exact: tuple[Table, ...]
    simulated: tuple[Table, ...]

    @property
    def equals(self) -> tuple[int, int]:
        """Return the number of equal exact figures, and the number of exact figures."""
        figures = [figure for table in self.exact for figure in table.figures]
        return sum(figure.is_equal for figure in figures), len(figures)

    @property
    def near(self) -> tuple[int, int]:
        """Return the number of simulated figures within tolerance, and of those fully specified."""
        figures = [f for table in self.simulated for f in table.figures if f.is_given]
        return sum(figure.is_near for figure in figures), len(figures)


def run(paper: Paper) -> Outcome:
    """Compute all tables of a paper."""
    exact = tuple(make() for make in (*paper.formulas, *paper.counts))
    return Outcome(paper, exact, tuple(make() for make in paper.simulated))


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the numbers of equal and near figures, by paper and in total."""
    lines = [
        "| paper | exact figures equal | simulated figures within 10 % |",
        "|---|---:|---:|",
    ]
    totals = [0, 0, 0, 0]
    for each in outcomes:
        counts = [*each.equals, *each.near]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        lines.append(_counts_line(each.paper.title, counts))
    return "\n".join([*lines, _counts_line("all", totals)])


def _counts_line(name: str, counts: Sequence[int]) -> str:
    equal, exact, near, given = counts
    return f"| {name} | {equal} of {exact} | {f'{near} of {given}' if given else '-'} |"


def markdown(outcome: Outcome, most_rows: int = MOST_ROWS) -> str:
    """Return all tables of a paper; longer ones are summarized."""
    parts = [f"## {outcome.paper.title}"]
    for table in outcome.exact:
        parts += [*_head(table), _exact(table)]
    for table in outcome.simulated:
        parts += [*_head(table), _simulated(table, most_rows)]
    return "\n\n".join(parts)


def _head(table: Table) -> list[str]:
    told = [f"*Given:* {table.given}.", f"*Assumed:* {table.assumed}."]
    if table.note:
        told.append(f"*Note:* {table.note}.")
    return [f"### {table.title}", *(fill(each, _COLUMNS, break_on_hyphens=False) for each in told)]


def _exact(table: Table) -> str:
    """Return one line that lists all exact figures that are not equal."""
    wrong = [figure for figure in table.figures if not figure.is_equal]
    if not wrong:
        return f"All {len(table.figures)} figures are equal."
    named = "; ".join(
        f"{each.what}: {_number(each.paper)}, ours {_number(each.ours)}" for each in wrong
    )
    return f"{len(table.figures) - len(wrong)} of {len(table.figures)} are equal. Not: {named}."


def _simulated(table: Table, most_rows: int) -> str:
    """Return the figures; of a table with more rows, the first and those beyond the tolerance."""
    lines = ["| | paper | ours | error | |", "|---|---:|---:|---:|---|"]
    figures = table.figures
    if len(figures) <= most_rows:
        return "\n".join([*lines, *map(_line, figures)])
    near = [figure for figure in figures if figure.is_near and figure.is_given]
    largest = max(abs(figure.error) for figure in near)
    shown = [figures[0], *(f for f in figures[1:] if f not in near)]
    counts = (
        f"{len(near)} of {len(figures)} figures are within {100 * WITHIN:.0f} %; their largest "
        f"error is {100 * largest:.1f} %. Shown are the first one and those outside:"
    )
    return "\n".join([counts, "", *lines, *map(_line, shown)])


def _line(figure: Figure) -> str:
    verdict = "" if figure.is_near else f"more than {100 * WITHIN:.0f} %"
    if not figure.is_given:
        verdict = "too little given"
    error = f"{100 * figure.error:+.1f} %"
    numbers = f"{_number(figure.paper)} | {_number(figure.ours)}"
    return f"| {figure.what} | {numbers} | {error} | {verdict} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
