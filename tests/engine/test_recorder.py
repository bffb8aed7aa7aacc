"""Conversion of events from several hosts, whose clocks differ, to one clock."""

from gpipe_hpc.engine.recorder import on_one_clock
from gpipe_hpc.schedule import Action, Event, Op


def events(rank, start_s):
    return (Event(rank, Action(Op.F, rank, 0), start_s, start_s + 1.0),)


def test_events_are_converted_to_the_clock_of_the_first_rank():
    """Regression: a timeline of two hosts showed the difference of their uptimes."""
    recorded = [
        (1, 100.0, events(0, 90.0)),
        (1, 100.5, events(1, 91.0)),  # the clock of rank 0, so no conversion
        (2, 7000.0, events(2, 6992.0)),
    ]
    starts = [row[0].start_s for row in on_one_clock(recorded)]
    assert starts == [90.0, 91.0, 92.0]
    assert [row[0].duration_s for row in on_one_clock(recorded)] == [1.0] * 3
