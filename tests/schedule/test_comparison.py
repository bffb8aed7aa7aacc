import pytest

from gpipe_hpc.schedule import (
    compare,
    comparison_table,
    gains_table,
    schedule_names,
    search_gains,
)


def test_every_schedule_is_compared():
    names = {standing.name for standing in compare(4, 8)}
    assert names == set(schedule_names()) - {"auto", "file"}


def test_standings_are_those_of_the_papers():
    """K = 4, M = 8, F = I = W = 1: steps of 24 units of work, memory in K-ths of the model."""
    found = {standing.label: standing for standing in compare(4, 8)}
    gpipe, one = found["gpipe"], found["one_f_one_b"]
    assert (gpipe.makespan, gpipe.activations, gpipe.weights) == (33, 8, 1)
    assert (one.makespan, one.activations, one.bubble) == (33, 4, pytest.approx(3 / 11))
    assert one.transfers == 2 * 3 * 8
    twice = found["interleaved (stages_per_rank=2)"]
    assert (twice.makespan, twice.activations, twice.weights) == (28.5, 5.5, 1)
    assert twice.transfers == 2 * 7 * 8
    assert (found["zb_h1"].makespan, found["zb_h1"].activations) == (27, 4)
    assert (found["zb_v"].makespan, found["zb_v"].activations) == (25.5, 4)
    assert found["zb_v"].transfers == 2 * 6 * 8  # the turn of the V stays on its rank
    assert found["v_half"].activations == 3
    assert (found["gems"].activations, found["gems"].weights) == (1, 2)
    assert (found["dualpipe"].activations, found["dualpipe"].weights) == (5, 2)
    assert (found["dualpipe_v"].activations, found["dualpipe_v"].weights) == (4.5, 1)
    assert found["chimera (pipelines=4)"].weights == 4


def test_slow_transfers_count_against_many_stages():
    found = {standing.label: standing for standing in compare(4, 8, send=2.0)}
    assert found["interleaved (stages_per_rank=4)"].makespan > found["one_f_one_b"].makespan


def test_the_table_is_markdown_and_says_what_is_left_out():
    lines = comparison_table(compare(3, 4)).splitlines()
    assert lines[0].startswith("| schedule ")
    assert lines[0].count("|") == 7
    table = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in table}) == 1
    assert set(table[1]) == set("|-: ")
    refusals = [line for line in lines if line.startswith("Not in the table: ")]
    assert any("dualpipe" in line and "even number of ranks" in line for line in refusals)


def test_search_gains_on_unequal_stages():
    """One stage takes three times as long: a searched order saves time where ranks hold several."""
    cases = [("one_each", 4), ("looped", None), ("wave", 6), ("mirrored", 4)]
    gains = search_gains(4, 8, [1, 1, 3, 1], send=0.1, cases=cases)
    assert all(each.gain >= 0 for each in gains)
    assert sum(each.gain > 0.02 for each in gains) >= 3
    lines = gains_table(gains).splitlines()
    assert len(lines) == 2 + len(cases)
    assert "zb_h1" in lines[2]
    tight = search_gains(2, 2, [1], cases=[("one_each", 1)])
    assert tight[0].gain is None
    assert "none fits" in gains_table(tight)
