"""Events of several hosts, whose clocks began at different times."""

from gpipe_hpc.engine.recorder import on_one_clock
from gpipe_hpc.schedule import Action, Event, Op


def events(rank, start_s):
    return (Event(rank, Action(Op.F, rank, 0), start_s, start_s + 1.0),)


def test_all_events_are_on_the_clock_of_the_first_rank():
    """A picture of two hosts showed the difference of their uptimes."""
    told = [
        (1, 100.0, events(0, 90.0)),
        (1, 100.5, events(1, 91.0)),  # the same clock: the moment says nothing
        (2, 7000.0, events(2, 6992.0)),
    ]
    starts = [row[0].start_s for row in on_one_clock(told)]
    assert starts == [90.0, 91.0, 92.0]
    assert [row[0].duration_s for row in on_one_clock(told)] == [1.0] * 3
