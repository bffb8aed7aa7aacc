import xml.etree.ElementTree as ET

import pytest

from gpipe_hpc.schedule import (
    Costs,
    Event,
    Timeline,
    add_offload,
    build,
    from_text,
    lower,
    parse_action,
    simulate,
)
from gpipe_hpc.visualize import draw_svg, draw_text
from gpipe_hpc.visualize.colours import GROUNDS
from gpipe_hpc.visualize.text import draw_text_memory

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(recompute="always", **costs):
    bare = build("gpipe", ranks=2, microbatches=2, recompute=recompute)
    return simulate(lower(bare), Costs(**{"forward": 1, "backward": 2, "recompute": 1, **costs}))


def test_text_of_a_small_schedule():
    assert draw_text(timeline_of()).splitlines() == [
        "rank 0 F0F1R1......B1==R0B0==",
        "rank 1 ..F0F1R1B1==R0B0==....",
        "F- forward, B= backward, R* recompute, . idle; makespan 11, "
        "bubble 27.3% (idle over total)",
    ]


def test_text_shows_what_is_summed_where_a_rank_computes_nothing():
    """It was drawn as idle time, and only the makespan told of it."""
    lines = draw_text(timeline_of(reduction=2)).splitlines()
    assert lines[0] == "rank 0 F0F1R1......B1==R0B0==::::"
    assert lines[1] == "rank 1 ..F0F1R1B1==R0B0==::::...."
    assert ", : reduction over replicas, . idle; makespan 13" in lines[2]


def test_text_keeps_to_a_width_and_cuts_labels_that_do_not_fit():
    lines = draw_text(timeline_of(), width=11).splitlines()
    assert lines[0] == "rank 0 FFR...B1RB0"
    assert all(len(line) == len("rank 0 ") + 11 for line in lines[:2])


def test_text_of_unequal_stages_is_to_scale():
    lines = draw_text(timeline_of(recompute="never", forward=[1, 3]), width=130).splitlines()
    idle = [row[7:].count(".") / 130 for row in lines[:2]]
    assert sum(idle) / 2 == pytest.approx(timeline_of("never", forward=[1, 3]).bubble, abs=0.02)


def test_ranks_with_several_stages_show_the_stage():
    timeline = simulate(from_text("0F0,1F0,1B0,0B0\n"), Costs(forward=1, backward=1))
    assert draw_text(timeline).startswith("rank 0 0F01F01B00B0\n")


def test_text_shows_short_times_in_a_unit_that_fits():
    events = ((Event(0, parse_action("0F0"), 7.0, 7.25), Event(0, parse_action("0B0"), 7.25, 7.5)),)
    timeline = Timeline(events=events, num_stages=1, num_microbatches=1)
    assert "makespan 500 ms" in draw_text(timeline, unit="s")
    assert "makespan 0.5," in draw_text(timeline)


def test_text_of_memory_has_the_columns_of_the_picture():
    timeline = timeline_of()
    assert draw_text_memory(timeline).splitlines() == [
        "rank 0 1122222222222222111111",
        "rank 1 ..1122222222111111....",
        "live activations (micro-batches of one stage), peaks 2 2",
    ]


def test_text_of_memory_counts_on_in_letters():
    row = [Event(0, parse_action(f"0F{m}"), m, m + 1.0) for m in range(40)]
    row += [Event(0, parse_action(f"0B{m}"), m + 40, m + 41.0) for m in range(40)]
    timeline = Timeline(events=(tuple(row),), num_stages=1, num_microbatches=40)
    line = draw_text_memory(timeline, width=80).splitlines()[0]
    assert line.startswith("rank 0 123456789abcdefghijklmnopqrstuvwxyz++")


@pytest.mark.parametrize("page", [40, 80])
def test_text_goes_on_below_where_the_page_is_narrow(page):
    """A terminal broke each line where it stood, and ranks no longer stood below one another."""
    timeline = simulate(build("zb_v", ranks=4, microbatches=8), Costs(1, None, 1, 1))
    whole = [line for line in draw_text(timeline).splitlines() if line.startswith("rank")]
    lines = draw_text(timeline, page=page).splitlines()
    assert max(map(len, lines)) <= page
    parts = [[line[7:] for line in lines if line.startswith(f"rank {r} ")] for r in range(4)]
    assert len(parts[0]) > 1
    assert [f"rank {rank} {''.join(part)}" for rank, part in enumerate(parts)] == whole
    memory = draw_text_memory(timeline, page=page).splitlines()
    assert max(map(len, memory)) <= page
    assert sum(line.startswith("columns ") for line in memory) == len(parts[0])
    wide = draw_text(timeline, page=300)
    assert wide == draw_text(timeline)


def test_text_of_nothing():
    assert "makespan 0" in draw_text(Timeline(events=((),), num_stages=1, num_microbatches=1))


def test_svg_has_a_box_for_every_compute_action_where_it_ran():
    timeline = timeline_of()
    root = ET.fromstring(draw_svg(timeline))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "op"]
    assert len(boxes) == 2 * 6
    starts = {float(box.get("x")) for box in boxes}
    rights = {float(box.get("x")) + float(box.get("width")) for box in boxes}
    assert min(starts) == 76
    assert max(rights) == pytest.approx(960 - 76, abs=0.1)
    tips = [title.text for title in root.iter(f"{SVG}title")]
    again = "waited for 1R1 of rank 1 (recomputed activations), over at 4"
    assert f"1B1, rank 1: 4 to 6 (takes 2); {again}" in tips
    assert "0F0, rank 0: 0 to 1 (takes 1)" in tips
    sent = "waited for 1SEND_B1 of rank 1 (gradient), over at 6"
    assert f"0B1, rank 0: 6 to 8 (takes 2); {sent}" in tips
    cells = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "cell"]
    assert sorted(cells) == ["0"] * 6 + ["1"] * 6


def test_svg_leaves_out_numbers_that_do_not_fit_and_escapes_what_it_is_given():
    events = (tuple(Event(0, parse_action(f"0F{m}"), m, m + 1.0) for m in range(500)),)
    timeline = Timeline(events=events, num_stages=1, num_microbatches=500)
    root = ET.fromstring(draw_svg(timeline, title="<a & b>", unit="<s>", width=960))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "<a & b>: makespan 500 <s>, bubble 0.0% (idle over total)"
    assert not [text for text in root.iter(f"{SVG}text") if text.get("class") == "cell"]
    assert "time (<s>)" in texts


def test_svg_shows_the_memory_of_every_rank_and_its_peak():
    timeline = simulate(build("one_f_one_b", ranks=3, microbatches=4), Costs(forward=1, backward=2))
    root = ET.fromstring(draw_svg(timeline))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [text for text in texts if text.startswith("peak")] == ["peak 3", "peak 2", "peak 1"]
    assert "3 ranks, 3 stages, 4 micro-batches; peak activations by rank: 3 2 1" in texts[1]
    curves = [path for path in root.iter(f"{SVG}path") if path.get("fill")]
    assert len(curves) == 3


def test_svg_of_nothing():
    root = ET.fromstring(draw_svg(Timeline(events=((),), num_stages=1, num_microbatches=1)))
    assert root.tag == f"{SVG}svg" and "makespan 0, bubble 0.0%" in "".join(root.itertext())


def test_svg_turns_dark_with_the_page_but_for_its_actions():
    """What stands on the page has a class that the style overrides; numbers in boxes have none."""
    picture = draw_svg(timeline_of())
    root = ET.fromstring(picture)
    style = root.find(f"{SVG}style").text
    dark = style[style.index("@media (prefers-color-scheme:dark)") :]
    grounds = {ground.name: light for light, ground in GROUNDS.items()}
    for name in grounds:
        assert f".{name}{{fill:{GROUNDS[grounds[name]].dark}}}" in dark
    for each in root.iter():
        kind, colour = each.get("class"), each.get("fill")
        if kind in grounds:
            assert colour == grounds[kind]
        elif colour in GROUNDS:
            assert kind == "cell"  # ink on a box, which stays
    assert {each.get("class") for each in root.iter(f"{SVG}text")} == {"ink", "muted", "cell"}
    lines = [path for path in root.iter(f"{SVG}path") if path.get("stroke")]
    assert lines
    assert {path.get("class") for path in lines} == {"line"}


def test_svg_shows_copies_with_their_times():
    table = add_offload(build("gpipe", ranks=1, microbatches=4))
    timeline = simulate(table, Costs(forward=1, backward=2, offload=0.5, fetch=0.5))
    tips = [title.text for title in ET.fromstring(draw_svg(timeline)).iter(f"{SVG}title")]
    assert "0OFFLOAD0, rank 0: 1 to 1.5" in tips
