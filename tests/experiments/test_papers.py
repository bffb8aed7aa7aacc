"""What experiments/papers holds to be equal: the formulas of the papers; and how figures count."""

import json
from collections import Counter
from pathlib import Path

import pytest

from experiments.papers.__main__ import HERE, PAPERS
from experiments.papers.gpipe import images
from experiments.papers.largest import amoebas, largest_transformer
from experiments.papers.report import Outcome, as_json, markdown, run, summary
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
def test_figures_are_those_on_file(paper):
    """All tables made again: a change of the simulator or the planner must show in the page."""
    made = json.loads(as_json([run(paper)]))
    on_file = json.loads((HERE / "figures.json").read_text(encoding="utf-8"))
    assert made == [each for each in on_file if each["of"] == paper.name]


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
    assert "not given enough" in page
    assert "| P | 1 of 2 | 1 of 2 |" in summary([outcome])
    assert len(json.loads(as_json([outcome]))) == 5


def test_a_printed_figure_is_compared_with_as_many_digits():
    assert as_printed(1_055_832_376, "1.06", 1e9) == (1.06, 1.06)
    assert as_printed(29_950_000, "30", 1e6) == (30.0, 30.0)


def test_the_page_says_what_the_figures_say():
    figures = json.loads((HERE / "figures.json").read_text(encoding="utf-8"))
    kinds = Counter(each["kind"] for each in figures)
    page = Path(HERE / "README.md").read_text(encoding="utf-8")
    assert f"| all | {kinds['exact']} of {kinds['exact']} |" in page
