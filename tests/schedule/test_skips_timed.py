"""Tables with long skips: when their transfers run, how they are written and drawn."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from gpipe_hpc.schedule import (
    Costs,
    Link,
    ScheduleError,
    build,
    check,
    from_text,
    lower,
    simulate,
    to_text,
)
from gpipe_hpc.schedule.measured import schedule_of
from gpipe_hpc.visualize import draw_svg, draw_text
from gpipe_hpc.visualize.chrome_trace import chrome_trace
from gpipe_hpc.visualize.html import render_html
from gpipe_hpc.visualize.layout import layout


def spans(timeline):
    return {str(e.action): (e.start_s, e.end_s) for row in timeline.events for e in row}


SKIPPING = Costs(
    forward=1, backward=2, send=0.25, link=Link(0.25, 4), skip_bytes={(0, 2): 20, (1, 3): 1}
)


@pytest.mark.parametrize("lowered", [False, True])
def test_a_skip_takes_the_link_from_its_source_to_its_destination(lowered):
    """A boundary takes 0.5, the skip 0.25 + 20 / 4: both ways stage 2 and then 0 wait for it."""
    table = replace(build("gpipe", ranks=3, microbatches=1), skips=((0, 2),))
    found = spans(simulate(lower(table) if lowered else table, SKIPPING))
    assert [found[text] for text in ("0F0", "1F0", "2F0")] == [(0, 1), (1.5, 2.5), (6.25, 7.25)]
    assert [found[text] for text in ("2B0", "1B0", "0B0")] == [
        (7.25, 9.25),
        (9.75, 11.75),
        (14.5, 16.5),
    ]
    if lowered:
        assert found["0SEND_F0@2"] == (1, 6.25)
        assert found["2SEND_B0@0"] == (9.25, 14.5)


def test_a_skip_and_a_boundary_of_one_link_go_one_after_the_other():
    table = replace(from_text("0F0,0B0\n1F0,2F0,2B0,1B0\n"), skips=((0, 2),))
    found = spans(simulate(lower(table), SKIPPING))
    assert found["0SEND_F0"] == (1, 1.5)
    assert found["0SEND_F0@2"] == (1.5, 6.75)
    assert found["2F0"] == (6.75, 7.75)
    assert found["2SEND_B0@0"] == (9.75, 15)
    assert found["1SEND_B0"] == (15, 15.5)
    assert found["0B0"] == (15.5, 17.5)


def test_a_skip_that_costs_nothing_changes_no_time():
    bare = build("one_f_one_b", ranks=4, microbatches=6)
    skipping = replace(bare, skips=((0, 2), (0, 3), (1, 3)))
    costs = Costs(forward=1, backward=2, send=0.25)
    assert simulate(skipping, costs).events == simulate(bare, costs).events


@pytest.mark.parametrize("amount", [-1, float("nan"), "much"])
def test_bytes_of_skips_are_amounts(amount):
    table = lower(build("gpipe", ranks=3, microbatches=1))
    with pytest.raises(ScheduleError, match="costs: skip_bytes"):
        simulate(table, replace(SKIPPING, skip_bytes={(0, 2): amount}))


def test_posted_buffers_of_skips_are_bounded():
    lowered = lower(replace(build("gpipe", ranks=3, microbatches=2), skips=((0, 2),)))
    assert lowered.max_receives[2] >= 2
    tight = tuple(bound - (rank == 2) for rank, bound in enumerate(lowered.max_receives))
    with pytest.raises(ScheduleError, match=r"rank 2.*4 posted receives, but"):
        check(replace(lowered, max_receives=tight))


def test_text_without_skips_names_none_and_skips_are_the_last_line():
    bare = build("gpipe", ranks=4, microbatches=1)
    assert "skips" not in to_text(lower(bare))
    text = to_text(replace(bare, skips=((0, 2), (1, 3))))
    assert text == to_text(bare) + "skips,0>2,1>3\n"
    assert from_text(text + "\n\n").skips == ((0, 2), (1, 3))
    with pytest.raises(
        ScheduleError, match=r"line 5, cell 3: expected a skip such as 0>4, got '1-3'"
    ):
        from_text(text.replace("1>3", "1-3"))
    with pytest.raises(ScheduleError, match="line 1, cell 1"):
        from_text("skips,0>2\n" + to_text(bare))


def test_drawings_name_the_transfer_over_a_skip():
    table = lower(replace(build("gpipe", ranks=3, microbatches=2), skips=((0, 2),)))
    timeline = simulate(table, SKIPPING)
    events = json.loads(chrome_trace([timeline]))["traceEvents"]
    waited = {e["name"]: e["args"]["waited for"] for e in events if e["ph"] == "X"}
    assert (waited["2F0"], waited["0B0"]) == ("0SEND_F0@2", "2SEND_B0@0")
    by_link = defaultdict(set)
    for event in events:
        if event["ph"] == "b":
            by_link[event["args"]["link"]].add(event["name"])
    assert by_link["rank 0 to 2"] == {"0SEND_F0@2", "0SEND_F1@2"}
    assert "0SEND_F*@2" in render_html(layout([timeline]), "")
    assert draw_text(timeline).count("\n") == 3
    assert draw_svg(timeline).startswith("<svg")
    assert schedule_of(timeline).skips == ((0, 2),)
