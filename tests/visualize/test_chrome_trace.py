"""The trace: what Perfetto needs to show ranks, transfers and memory."""

import json
from collections import Counter, defaultdict

import pytest

from gpipe_hpc.schedule import Costs, build, lower, simulate
from gpipe_hpc.visualize.chrome_trace import chrome_trace


def timeline_of(name="one_f_one_b", send=0.5, **options):
    schedule = lower(build(name, ranks=3, microbatches=6, **options))
    return simulate(schedule, Costs(forward=1, backward=2, send=send))


def events_of(*timelines):
    return json.loads(chrome_trace(timelines))["traceEvents"]


def test_every_compute_action_is_a_slice_of_its_rank():
    timeline = timeline_of()
    slices = [event for event in events_of(timeline) if event["ph"] == "X"]
    wanted = [event for row in timeline.events for event in row if event.action.op in ("F", "B")]
    assert [(each["name"], each["ts"], each["dur"]) for each in slices] == [
        (str(event.action), event.start_s * 1e6, event.duration_s * 1e6) for event in wanted
    ]
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events_of(timeline)
        if each["name"] == "thread_name"
    }
    assert [names[each["pid"], each["tid"]] for each in slices] == [
        f"rank {event.rank}" for event in wanted
    ]
    first = next(each for each in slices if each["name"] == "1F0")
    assert first["args"] == {"stage": 1, "microbatch": 0, "waited for": "0SEND_F0", "why": "output"}


def test_arrows_lead_from_slice_to_slice():
    """Perfetto drops an arrow whose ends lie on no slice of their thread."""
    events = events_of(timeline_of())
    slices = [event for event in events if event["ph"] == "X"]

    def slice_at(end):
        (found,) = (
            each["name"]
            for each in slices
            if each["tid"] == end["tid"] and each["ts"] <= end["ts"] < each["ts"] + each["dur"]
        )
        return found

    ends = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    assert len(ends) == 6 * 2 * 2
    arrows = {(slice_at(each["s"]), slice_at(each["f"])) for each in ends.values()}
    assert ("0F3", "1F3") in arrows and ("2B5", "1B5") in arrows and len(arrows) == len(ends)


@pytest.mark.parametrize("options", [{}, {"name": "interleaved", "stages_per_rank": 2}])
def test_transfers_of_a_link_follow_one_another(options):
    tracks = defaultdict(list)
    for event in events_of(timeline_of(**options)):
        if event["ph"] in "be":
            tracks[event["id2"]["local"]].append(event)
    assert len(tracks) >= 4
    for track in tracks.values():
        assert [event["ph"] for event in track] == ["b", "e"] * (len(track) // 2)
        assert [event["ts"] for event in track] == sorted(event["ts"] for event in track)


def test_transfers_that_take_no_time_are_arrows_alone():
    kinds = Counter(event["ph"] for event in events_of(timeline_of(send=0)))
    assert kinds["s"] == kinds["f"] == 24 and not kinds["b"] and not kinds["e"]


def test_memory_is_a_counter_for_each_rank():
    counters = defaultdict(list)
    for event in events_of(timeline_of()):
        if event["ph"] == "C":
            counters[event["name"]].extend(event["args"].values())
    assert [max(values) for values in counters.values()] == [3, 2, 1]


def test_several_timelines_are_several_processes():
    events = events_of(timeline_of(), timeline_of("gpipe"))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["one_f_one_b", "gpipe"]
    assert {event["pid"] for event in events} == set(names)
