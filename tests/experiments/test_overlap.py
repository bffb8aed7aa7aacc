"""The measurement of overlap over a slow link."""

import pytest

from experiments.outer.slow_link.overlap import bucket_s, measured, parsed, table
from experiments.outer.slow_link.overlap_ranks import Step, covered_s
from gpipe_hpc.schedule import Action, Event, Op


def test_time_covered_counts_what_overlaps_once():
    action = Action(Op.REDUCE_GRAD, 0)
    spans = [(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.7)]
    assert covered_s([Event(0, action, *span) for span in spans]) == pytest.approx(4.0)
    assert covered_s([]) == 0.0


def test_a_bucket_takes_its_bytes_and_two_delays():
    """Of two ranks each sends half, then half of the sum."""
    assert bucket_s(1e6, 100e6, 0.005) == pytest.approx(0.090)


def test_the_table_sets_both_below_one_another():
    steps = [
        Step(overlap=True, step_s=2.0, compute_s=1.8, drain_s=0.4, reduction_s=0.5),
        Step(overlap=False, step_s=2.5, compute_s=1.8, drain_s=0.4, reduction_s=0.6),
        Step(overlap=True, step_s=2.0, compute_s=1.8, drain_s=0.4, reduction_s=0.5),
    ]
    lines = [[c.strip() for c in x.split("|")[1:-1]] for x in table(steps, 0.1).splitlines()]
    assert lines[2:] == [
        ["yes", "2", "2.000", "0.000", "1.800", "0.400", "0.500", "0.200", "5.0%"],
        ["no", "1", "2.500", "0.000", "1.800", "0.400", "0.600", "0.700", "24.0%"],
    ]


@pytest.mark.two_hosts
def test_both_run_side_by_side_over_the_link(two_hosts, tmp_path):
    """A reduction has its time within the step, and both timelines show the reductions."""
    two_hosts()  # or skip
    small = ["--samples", "8", "--width", "32", "--seq-len", "16", "--bucket-bytes", "20e3"]
    steps = measured(parsed(["--rounds", "2", "--rate", "20e6", *small]), tmp_path)
    assert sorted(step.overlap for step in steps) == [False, False, True, True]
    for step in steps:
        assert 0 < step.drain_s <= step.compute_s <= step.step_s
        assert 0 < step.reduction_s <= step.step_s
    for name in ("overlap", "no_overlap"):
        assert "REDUCE" in (tmp_path / f"{name}.svg").read_text()
