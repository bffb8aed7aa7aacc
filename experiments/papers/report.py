"""Tables of papers as Markdown and JSON."""

import json
from collections.abc import Sequence
from textwrap import fill
from typing import Any, Final, NamedTuple

from experiments.papers.table import WITHIN, Figure, Paper, Table

_COLUMNS: Final = 115


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


def markdown(outcome: Outcome) -> str:
    """Return all tables of a paper."""
    parts = [f"## {outcome.paper.title}"]
    for table in outcome.exact:
        parts += [*_head(table), _exact(table)]
    for table in outcome.simulated:
        parts += [*_head(table), _simulated(table)]
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


def _simulated(table: Table) -> str:
    lines = ["| | paper | ours | error | |", "|---|---:|---:|---:|---|"]
    return "\n".join([*lines, *map(_line, table.figures)])


def _line(figure: Figure) -> str:
    verdict = "" if figure.is_near else f"more than {100 * WITHIN:.0f} %"
    if not figure.is_given:
        verdict = "not given enough"
    error = f"{100 * figure.error:+.1f} %"
    numbers = f"{_number(figure.paper)} | {_number(figure.ours)}"
    return f"| {figure.what} | {numbers} | {error} | {verdict} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def as_json(outcomes: Sequence[Outcome]) -> str:
    """Return every figure as JSON."""
    found = [
        {"of": each.paper.name, "table": table.title, "kind": kind, **_values(figure)}
        for each in outcomes
        for kind, tables in (("exact", each.exact), ("simulated", each.simulated))
        for table in tables
        for figure in table.figures
    ]
    lines = ",\n".join(json.dumps(each) for each in found)
    return f"[\n{lines}\n]\n"


def _values(figure: Figure) -> dict[str, Any]:
    ours = float(f"{figure.ours:.6g}")
    return {
        "what": figure.what,
        "paper": figure.paper,
        "ours": ours,
        "given_enough": figure.is_given,
    }
