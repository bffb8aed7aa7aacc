"""The page: complete in itself, and holding what the timeline holds."""

import json
import re

import pytest

from gpipe_hpc.schedule import Costs, Event, Timeline, build, lower, parse_action, simulate
from gpipe_hpc.visualize.html import render_html
from gpipe_hpc.visualize.layout import layout

COSTS = Costs(forward=1, backward=2, send=0.25)


def scene_in(page):
    """Return what a browser would read."""
    found = re.search(r'<script id="scene" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def text_of(scene, kind, microbatch):
    return scene["kinds"][kind].replace("*", str(microbatch))


def actions_of(scene, row):
    """Return the actions of a row, as the page writes them."""
    return [text_of(scene, *each) for each in zip(row["kind"], row["microbatch"], strict=True)]


@pytest.fixture(scope="module")
def timeline():
    return simulate(lower(build("one_f_one_b", ranks=3, microbatches=4)), COSTS)


def test_page_needs_no_other_file(timeline):
    page = render_html(layout([timeline]), "a title")
    assert page.startswith("<!DOCTYPE html>") and "<title>a title</title>" in page
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(|\bfetch\(|{{", page)


def test_page_holds_every_action_with_its_times(timeline):
    scene = scene_in(render_html(layout([timeline]), ""))
    (section,) = scene["sections"]
    assert len(section["rows"]) == 3
    for row, events in zip(section["rows"], timeline.events, strict=True):
        computed = [event for event in events if event.action.op in ("F", "B")]
        assert actions_of(scene, row) == [str(event.action) for event in computed]
        assert row["start"] == [event.start_s for event in computed]
        assert row["took"] == [event.duration_s for event in computed]


def test_page_names_what_each_action_waited_for(timeline):
    scene = scene_in(render_html(layout([timeline]), ""))
    (section,) = scene["sections"]
    actions = [action for row in section["rows"] for action in actions_of(scene, row)]
    row = section["rows"][1]
    own = actions_of(scene, row)
    for action, maker, send in (("1F0", "0F0", "0SEND_F0"), ("1B0", "2B0", "2SEND_B0")):
        at = own.index(action)
        assert actions[row["maker"][at]] == maker
        assert text_of(scene, row["send"][at], row["microbatch"][at]) == send
    assert row["start"][own.index("1F0")] - row["ahead"][own.index("1F0")] == 1.25
    late = own.index("1F2")
    assert row["ahead"][late] > 0  # it was there long before the rank came to it
    assert section["rows"][0]["send"][0] == -1
    assert section["rows"][0]["maker"][0] == -1


def test_page_has_runs_one_above_the_other_and_a_table(timeline):
    page = render_html(layout([timeline, timeline]), "", [["kind", "time"], ["<F>", "1 & 2"]])
    tops = [section["rows"][0]["y"] for section in scene_in(page)["sections"]]
    assert len(tops) == 2 and tops[0] < tops[1]
    assert "<th>kind</th>" in page and "<td>&lt;F&gt;</td><td>1 &amp; 2</td>" in page


def test_page_is_proof_against_names(timeline):
    name = "</script><b>{{table}}"
    evil = Timeline(timeline.events, 3, 4, name)
    page = render_html(layout([evil]), name)
    assert scene_in(page)["sections"][0]["name"] == name
    assert page.count("</script>") == 2 and "<b>{{" not in page.split("<script")[0]


def test_page_of_many_actions_stays_small():
    rows = tuple(
        tuple(
            Event(r, parse_action(f"{r}F{m}"), r + m * 1.37, r + m * 1.37 + 1) for m in range(128)
        )
        for r in range(64)
    )
    page = render_html(layout([Timeline(rows, 64, 128)]), "")
    assert len(page) / (64 * 128) < 60


def test_page_turns_dark_and_knows_both_colours_of_all_that_is_no_action(timeline):
    page = render_html(layout([timeline]), "")
    assert "@media (prefers-color-scheme: dark)" in page
    assert 'matchMedia("(prefers-color-scheme: dark)")' in page
    scene = scene_in(page)
    names = {"page", "idle", "ink", "muted", "memory", "rule"}
    assert set(scene["grounds"]) == names
    for light, dark in scene["grounds"].values():
        assert light != dark
    used = {each["c"] for each in scene["fixed"]}
    assert {"ink", "muted", "idle"} <= used
    # Whatever the page asks for by name is there.
    assert set(re.findall(r'ground\("(\w+)"\)', page)) <= names


def test_page_says_why_an_action_waited(timeline):
    scene = scene_in(render_html(layout([timeline]), ""))
    row = scene["sections"][0]["rows"][1]
    reasons = {
        action: scene["things"][why]
        for action, why, maker in zip(actions_of(scene, row), row["why"], row["maker"], strict=True)
        if maker >= 0
    }
    assert reasons["1F0"] == "output"
    assert reasons["1B0"] == "gradient"
