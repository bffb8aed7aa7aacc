"""The tables of experiments/papers: exact formulas, and how figures are counted and shown."""

import pytest

from experiments.papers.__main__ import HERE, PAPERS
from experiments.papers.gpipe import images
from experiments.papers.largest import amoebas, largest_transformer
from experiments.papers.report import Outcome, markdown, run, summary
from experiments.papers.table import Figure, Paper, Table, as_printed
from experiments.papers.zero_bubble import SETUPS, cost_ms


@pytest.mark.parametrize("paper", [each for each in PAPERS if each.formulas], ids=lambda p: p.name)
def test_formulas_are_met_exactly(paper):
    for make in paper.formulas:
        table = make()
        assert table.figures
        assert [figure for figure in table.figures if not figure.is_equal] == []


def test_parameter_counts_are_as_printed():
    assert [figure for figure in images().figures if not figure.is_equal] == []


def test_the_largest_transformer_grows_with_the_accelerators():
    """13 on one, as the paper's; then nearly as many for each further one."""
    found = [largest_transformer(number, 0.1) for number in (1, 2, 8)]
    assert found[0] == 13 and found[1] >= 25 and 103 <= found[2] <= 1.1 * 103


def test_amoebanets_of_table_1_fit():
    assert [figure for figure in amoebas().figures if not figure.is_equal] == []


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.name)
def test_figures_are_those_of_the_page(paper):
    """All tables are computed again: a change of the simulator or planner must show in the page."""
    assert markdown(run(paper)) in (HERE / "README.md").read_text(encoding="utf-8")


def test_a_calculated_bubble_rate_of_the_zero_bubble_paper():
    """Its own calculation from the same times: 0.2431 and 0.1585."""
    for name, paper in (("1F1B", 0.2431), ("ZB-H1", 0.1585)):
        assert 1 - SETUPS[0].work_ms / cost_ms(name, 0) == pytest.approx(paper, rel=0.02)


def test_a_figure_off_is_named_and_one_not_given_is_not_counted():
    table = Table("t", "all", "nothing", (Figure("a", 1, 1), Figure("b", 10, 11.5)))
    told = Table("s", "all", "nothing", (*table.figures, Figure("c", 1, 9, is_given=False)))
    outcome = Outcome(Paper("p", "P"), (table,), (told,))
    assert (outcome.equals, outcome.near) == ((1, 2), (1, 2))
    page = markdown(outcome)
    assert "1 of 2 are equal. Not: b: 10, ours 11.5." in page
    assert "| b | 10 | 11.5 | +15.0 % | more than 10 % |" in page
    assert "too little given" in page
    assert "| P | 1 of 2 | 1 of 2 |" in summary([outcome])


def test_a_printed_figure_is_compared_with_as_many_digits():
    assert as_printed(1_055_832_376, "1.06", 1e9) == (1.06, 1.06)
    assert as_printed(29_950_000, "30", 1e6) == (30.0, 30.0)


def test_a_long_table_shows_the_first_figure_and_those_beyond_the_tolerance():
    figures = [Figure(f"near {i}", 10, 10 + 0.1 * i) for i in range(5)]
    figures += [Figure("far", 10, 12), Figure("open", 10, 10, is_given=False)]
    outcome = Outcome(Paper("p", "P"), (), (Table("t", "all", "nothing", tuple(figures)),))
    page = markdown(outcome, most_rows=6)
    assert "5 of 7 figures are within 10 %; their largest error is 4.0 %." in page
    shown = [name for name in ("near 0", "near 1", "far", "open") if f"| {name} |" in page]
    assert shown == ["near 0", "far", "open"]
    assert "| near 1 |" in markdown(outcome, most_rows=7)
