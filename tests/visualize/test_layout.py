"""Where things stand in a picture, what colour they have and what they waited for."""

import itertools

import pytest

from gpipe_hpc.schedule import (
    Costs,
    Event,
    Op,
    Timeline,
    add_offload,
    build,
    from_text,
    lower,
    parse_action,
    simulate,
)
from gpipe_hpc.schedule.memory import live_activations
from gpipe_hpc.schedule.waits import DataFlow
from gpipe_hpc.visualize.colours import GROUNDS, HUES, IDLE, INK, MUTED, PAGE, Tints, fill, ink_on
from gpipe_hpc.visualize.layout import layout
from gpipe_hpc.visualize.scene import MARK_HEIGHT, Rect, TextLine, clock_for, label_fits, round_step

COSTS = Costs(forward=1, input_gradient=1, weight_gradient=1, recompute=1)


def timeline_of(name, ranks=4, microbatches=8, costs=COSTS, **options):
    return simulate(lower(build(name, ranks=ranks, microbatches=microbatches, **options)), costs)


def event_of(timeline, text):
    action = parse_action(text)
    return next(event for row in timeline.events for event in row if event.action == action)


# Colours as eyes without long, middle or short cones see them, on linear RGB: Machado, Oliveira and
# Fernandes, A physiologically-based model for simulation of color vision deficiency, 2009.
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def lab(colour, eye):
    """Return CIE L*a*b* of a colour as an eye sees it, under D65."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [min(1, max(0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in eye]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        sum(a * b for a, b in zip(row, seen, strict=True)) / full
        for row, full in zip(to_xyz, white, strict=True)
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one, other, eye):
    pairs = zip(lab(one, eye), lab(other, eye), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5


@pytest.mark.parametrize("eye", EYES.values(), ids=EYES)
def test_ops_differ_for_every_eye(eye):
    """In CIE76, where 2.3 is just noticeable: 16 and more between any tints of two ops."""
    colours = {op: [fill(op, tint, 2) for tint in (0, 1)] for op in HUES}
    colours["idle, on a light page and on a dark one"] = [IDLE, GROUNDS[IDLE].dark]
    for (_, ones), (_, others) in itertools.combinations(colours.items(), 2):
        assert min(distance(one, other, eye) for one in ones for other in others) > 16


def test_tints_of_an_op_go_from_light_to_dark_and_labels_stay_readable():
    for op in HUES:
        tints = [fill(op, tint, 4) for tint in range(4)]
        lightness = [lab(each, EYES["normal"])[0] for each in tints]
        assert lightness == sorted(lightness, reverse=True) and len(set(tints)) == 4
        for each in tints:
            assert abs(lab(each, EYES["normal"])[0] - lab(ink_on(each), EYES["normal"])[0]) > 40


@pytest.mark.parametrize("ink", [INK, MUTED])
def test_words_are_readable_on_a_light_page_and_on_a_dark_one(ink):
    """By the contrast of WCAG 2, of which 4.5 is asked for."""
    for one, page in ((ink, PAGE), (GROUNDS[ink].dark, GROUNDS[PAGE].dark)):
        low, high = sorted(luminance(each) for each in (one, page))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpipe", {}, ""),
        ("zb_v", {}, "light to dark: stages 0-3, 4-7"),
        ("interleaved", {"stages_per_rank": 3}, "light to dark: stages 0-3, 4-7, 8-11"),
        ("chimera", {}, "light to dark: micro-batches that start on rank 0, 3"),
    ],
)
def test_the_legend_says_what_light_and_dark_stand_for(name, options, words):
    timeline = timeline_of(name, **options)
    assert Tints(timeline).words == words
    texts = [each.text for each in layout([timeline]).fixed if isinstance(each, TextLine)]
    assert (words in texts) == bool(words)


def test_each_of_compared_timelines_has_the_legend_of_its_own_colours():
    """The tints of the first alone were explained, and the ops of all stood beside it."""
    scene = layout([timeline_of("gpipe"), timeline_of("zb_v"), timeline_of("gpipe")])
    texts = [each.text for each in scene.fixed if isinstance(each, TextLine)]
    assert texts.count("backward") == 1
    assert texts.count("input gradient") == texts.count("light to dark: stages 0-3, 4-7") == 1
    assert texts.index("backward") < texts.index("input gradient")


def test_a_legend_that_is_too_long_goes_on_in_a_new_line():
    table = add_offload(build("zb_v", ranks=2, microbatches=6, recompute="always"))
    costs = Costs(1, None, 1, 1, 1, offload=0.5, fetch=0.5, reduction=1)
    scene = layout([simulate(lower(table), costs)], width=500)
    patches = [each for each in scene.fixed if isinstance(each, Rect)]
    assert len({patch.y for patch in patches}) > 1
    assert max(patch.x + patch.width for patch in patches) < 500


def test_copies_and_reductions_stand_below_the_row_of_their_rank():
    table = add_offload(build("gpipe", ranks=2, microbatches=4))
    costs = Costs(1, 2, offload=0.5, fetch=0.5, reduction=1)
    timeline = simulate(lower(table), costs)
    scene = layout([timeline])
    first, second = scene.sections[0].rows
    assert [str(mark.event.action) for mark in first.marks] == [
        str(event.action)
        for event in timeline.events[0]
        if event.action.op in ("OFFLOAD", "FETCH", "REDUCE_GRAD")
    ]
    assert first.y + first.height < first.mark_y < first.mark_y + MARK_HEIGHT < second.y
    texts = [each.text for each in scene.fixed if isinstance(each, TextLine)]
    assert {"copy to the host", "copy back", "reduction over replicas"} <= set(texts)
    assert not any(row.marks for row in layout([timeline_of("gpipe")]).sections[0].rows)


def test_labels_of_two_digits_shrink_so_that_all_have_their_number():
    """Of 16 micro-batches on 8 ranks, those from 10 on had none."""
    timeline = timeline_of("interleaved", ranks=8, microbatches=16)
    scene = layout([timeline])
    for row in scene.sections[0].rows:
        assert 8 <= row.label_size <= 11
        for box in row.boxes:
            assert label_fits(box.label, row.label_size, box.duration * scene.scale)


def test_tints_follow_the_stages_of_a_rank_or_the_ways_of_micro_batches():
    assert len(Tints(timeline_of("gpipe"))) == 1
    interleaved = Tints(timeline_of("interleaved", stages_per_rank=3))
    assert [interleaved.of(stage, 0) for stage in (0, 3, 4, 8, 11)] == [0, 0, 1, 2, 2]
    v_shaped = Tints(timeline_of("zb_v"))
    assert [v_shaped.of(stage, 5) for stage in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    mirrored = timeline_of("chimera")
    tints = Tints(mirrored)
    assert len(tints) == 2
    # A micro-batch keeps its tint all its way, and those that start on another rank have the other.
    firsts = {event_of(mirrored, f"0F{m}").rank: tints.of(0, m) for m in range(8)}
    assert len(firsts) == 2 and set(firsts.values()) == {0, 1}
    assert all(tints.of(stage, 3) == tints.of(0, 3) for stage in range(4))


def test_an_event_waited_for_the_last_of_its_dependencies():
    timeline = timeline_of("gpipe", 2, 2, Costs(forward=1, backward=2, send=0.5))
    flow = DataFlow(timeline)
    assert flow.waited_for(event_of(timeline, "0F0")) is None
    wait = flow.waited_for(event_of(timeline, "1F1"))
    assert wait.maker.action == parse_action("0F1")
    assert wait.send.action == parse_action("0SEND_F1")
    assert wait.over_s == wait.send.end_s == 2.5
    # On the last stage B needs F alone, which is over long before where others came between.
    own = flow.waited_for(event_of(timeline, "1B0"))
    assert (own.maker.action, own.send) == (parse_action("1F0"), None)


def test_without_recorded_transfers_the_maker_is_named():
    timeline = simulate(build("gpipe", ranks=2, microbatches=2), COSTS)
    wait = DataFlow(timeline).waited_for(event_of(timeline, "1F1"))
    assert (wait.maker.action, wait.send) == (parse_action("0F1"), None)
    assert list(DataFlow(timeline).transfers()) == []


def test_nothing_starts_before_what_it_waited_for():
    costs = Costs(forward=[1, 2, 1, 3], input_gradient=2, weight_gradient=1, send=0.7)
    timeline = timeline_of("zb_h1", costs=costs)
    flow = DataFlow(timeline)
    waits = 0
    for row in timeline.events:
        for event in row:
            wait = flow.waited_for(event)
            if wait is not None:
                waits += 1
                assert wait.over_s <= event.start_s
    assert waits == 8 * (4 * 3 - 1)
    assert len(list(flow.transfers())) == 8 * 2 * 3


@pytest.mark.parametrize(
    "name", ["gpipe", "one_f_one_b", "interleaved", "zb_h2", "zb_v", "chimera", "dualpipe_v"]
)
def test_memory_curve_reaches_the_peak_and_ends_at_nothing(name):
    timeline = timeline_of(name)
    curves = [live_activations(timeline, rank) for rank in range(timeline.num_ranks)]
    peaks = tuple(max(step.live for step in curve) for curve in curves)
    assert peaks == timeline.peak_activations
    for curve in curves:
        times = [step.time_s for step in curve]
        assert times == sorted(set(times))
        assert curve[-1].live == 0


def test_forward_without_backward_is_kept_while_it_runs():
    row = tuple(Event(0, parse_action(f"0F{m}"), 2 * m, 2 * m + 1) for m in range(2))
    timeline = Timeline((row,), num_stages=1, num_microbatches=2)
    assert live_activations(timeline, 0) == [(0, 1), (1, 0), (2, 1), (3, 0)]


def test_layout_shows_idle_time_and_all_timelines_on_one_scale():
    long, short = timeline_of("gpipe"), timeline_of("zb_h1")
    scene = layout([long, short])
    assert len(scene.sections) == 2 and scene.span == long.makespan > short.makespan
    for section, timeline in zip(scene.sections, (long, short), strict=True):
        for row, busy in zip(section.rows, timeline.busy, strict=True):
            assert row.span == timeline.makespan
            assert sum(box.duration for box in row.boxes) == busy
            idle = sum(box.idle for box in row.boxes)
            last = row.boxes[-1].start + row.boxes[-1].duration
            assert idle + busy == pytest.approx(last)
    bottoms = [section.axes[-1].y for section in scene.sections]
    assert bottoms[0] < scene.sections[1].rows[0].y and bottoms[1] < scene.height
    # Each legend names the ops of its timeline.
    words = [each.text for each in scene.fixed if isinstance(each, TextLine)]
    assert words.count("forward") == 2 and words.count("weight gradient") == 1
    assert "recompute" not in words


def test_layout_is_as_wide_as_its_numbers_need_within_bounds():
    assert layout([timeline_of("gpipe", 2, 2)]).width == 960
    assert 960 < layout([timeline_of("gpipe", 4, 24)]).width < 1800
    assert layout([timeline_of("gpipe", 4, 200)]).width == 1800
    assert layout([timeline_of("gpipe", 4, 200)], width=700).width == 700


def test_layout_of_many_ranks_stays_on_the_page():
    events = tuple((Event(rank, parse_action(f"{rank}F0"), rank, rank + 1),) for rank in range(512))
    scene = layout([Timeline(events, 512, 1)])
    assert scene.height < 4000
    labels = [each for each in scene.fixed if isinstance(each, TextLine) and each.anchor == "end"]
    heights = sorted(each.y for each in labels if each.text.startswith("rank"))
    assert min(b - a for a, b in itertools.pairwise(heights)) > 8


def test_times_that_start_anywhere_are_drawn_from_zero():
    timeline = Timeline(((Event(0, parse_action("0F0"), 1000.5, 1000.75),),), 1, 1)
    scene = layout([timeline], unit="s")
    box = scene.sections[0].rows[0].boxes[0]
    assert (box.start, box.duration) == (0, 250)
    assert scene.clock.unit == "ms"


@pytest.mark.parametrize(
    ("longest", "unit", "shown"),
    [(2.0, "s", "s"), (0.5, "s", "ms"), (2e-4, "s", "us"), (0.5, "", "")],
)
def test_short_times_get_a_smaller_unit(longest, unit, shown):
    clock = clock_for(longest, unit)
    assert clock.unit == shown
    assert unit != "s" or 0.2 <= longest * clock.factor < 1000


@pytest.mark.parametrize(
    ("least", "step"), [(0, 0), (1, 1), (1.1, 2), (3, 5), (7, 10), (0.03, 0.05)]
)
def test_ticks_stand_at_round_times(least, step):
    assert round_step(least) == pytest.approx(step)


def test_recomputation_and_a_file_are_drawn_too():
    text = "0F0,0R0,0B0\n"
    scene = layout([simulate(from_text(text), Costs(forward=1, backward=2, recompute=1))])
    assert [box.event.action.op for box in scene.sections[0].rows[0].boxes] == [Op.F, Op.R, Op.B]
