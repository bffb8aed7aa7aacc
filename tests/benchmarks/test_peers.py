"""The comparison with peers: what is written of the figures that are kept is what they give."""

import importlib
from pathlib import Path

import pytest

from benchmarks.cells import Cell
from benchmarks.figures import load_figures
from benchmarks.rounds import Measured, Sample
from gpipe_hpc.schedule import build, lower, to_text

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def _find_the_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))


def test_tables_in_the_readmes_are_those_of_the_figures():
    report, claims = (importlib.import_module(name) for name in ("report", "claims"))
    figures = load_figures(PEERS / "figures.json")
    assert report.short_table(figures) in (ROOT / "README.md").read_text("utf-8")
    text = (PEERS / "README.md").read_text("utf-8")
    assert claims.table(claims.judge(figures)) in text
    assert report.markdown(figures) in text
    assert report.peers_plot(figures) == (PEERS / "peers.svg").read_text("utf-8")
    assert report.growth_plot(figures) == (PEERS / "growth.svg").read_text("utf-8")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_growth_counts_a_message_each_way_over_each_cut(ranks):
    growth = importlib.import_module("growth")
    table = build("one_f_one_b", ranks=ranks, microbatches=8)
    each = Measured(Cell("ours", "T", "one_f_one_b", 8))
    each.samples = [Sample((2.0,), 2.0, 0.0, 0, is_disturbed=False)]
    each.notes = [{"table": to_text(lower(table))}]
    point = growth._point(ranks, each)
    assert point["num_messages"] == 2 * (ranks - 1) * 8
    assert point["step_s"] == 2.0
