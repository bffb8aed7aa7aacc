"""The comparison with peers: the tables in the READMEs are those of figures.json."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import KEPT
from benchmarks.cells import FULL
from benchmarks.figures import Figures, Row, load_figures
from benchmarks.peers.claims import judge, table
from benchmarks.peers.grid import MICROBATCHES, OTHERS, WORKLOADS, blocks
from benchmarks.peers.report import long_tables
from benchmarks.table import insert, short_table

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"


def row(contestant, variant, step_s, *, num_clean=4, recompute="never", peak=5_000_000):
    quartiles = (0.9 * step_s, 1.1 * step_s)
    return Row(contestant, variant, recompute, num_clean, 6, step_s, quartiles, 1.0, (peak, 1))


FLOOR = row("floor", "local", 0.5)


def test_tables_in_the_readmes_are_those_of_the_figures():
    assert short_table(load_figures(KEPT)) in (ROOT / "README.md").read_text("utf-8")
    figures = load_figures(PEERS / "figures.json")
    text = (PEERS / "README.md").read_text("utf-8")
    assert table(judge(figures)) in text
    assert long_tables(figures) in text


def test_the_short_table_has_the_fastest_schedule_of_each():
    rows = [
        FLOOR,
        row("ours", "gpipe", 0.6),
        row("ours", "zb_v", 0.55),
        row("ours", "auto", 0.5, num_clean=2),  # too few undisturbed steps
        row("ours", "gpipe", 0.7, recompute="except_last"),
        row("torch", "1F1B", 0.6, num_clean=2),
    ]
    versions = {"torch": "torch 2.13"}
    figures = Figures("machine", "today", versions, {"A M=8 short": rows})
    lines = short_table(figures).splitlines()
    cells = " | 500 | 1.10 ±0.11 zb_v | ~1.20 1F1B |  | 1.40 ±0.14 gpipe |  |"
    assert lines[0] == "machine, torch 2.13; today; 8 micro-batches."
    assert lines[4:] == [f"| A: GPT{cells}"]


def test_the_long_tables_have_a_column_for_each_model():
    others = [replace(FLOOR, median_s=1.0), row("ours", "hanayo", 1.5, peak=7_000_000)]
    missing = Row("ours", "gems", "never", failed="no time was left for it")
    figures = Figures(
        blocks={
            "A M=8 core": [FLOOR, row("ours", "gpipe", 0.6)],
            "C M=8 core": [FLOOR, row("ours", "gpipe", 0.75, num_clean=0)],
            "C M=8 other schedules": [*others, missing],
        }
    )
    text = long_tables(figures)
    assert "| ours gpipe | 1.20 ±0.12 |  | ~1.50 |  |  |" in text
    assert "| ours hanayo |  |  | 1.50 ±0.15 |  |  |" in text  # over the floor of its own block
    assert "| ours hanayo |  |  | 7 |  |" in text  # memory of tiny layers is left out
    assert "gems" not in text


@pytest.mark.parametrize("marked", [True, False])
def test_a_table_replaces_what_its_marks_enclose(marked):
    text = "a\n<!-- t: begin -->\nold\n<!-- t: end -->\nb\n" if marked else "a\n"
    new = insert(text, "t", "new")
    assert new == (text.replace("old", "\nnew") if marked else text)


def test_all_blocks_of_the_tables_and_claims_are_measured():
    first, rest = blocks()
    names = [each.name for each in (*first, *rest)]
    assert len(set(names)) == len(names)
    wanted = {f"{model} M={count} {FULL}" for model in WORKLOADS for count in MICROBATCHES}
    wanted |= {f"{model} M=8 {OTHERS}" for model in WORKLOADS}
    assert set(names) == wanted | {f"T M=16 {OTHERS}"}
