"""The report of a run: what adds up, what is named first, and pages that stand by themselves."""

import json
import random
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.report.__main__ import write_report
from gpipe_hpc.report.accounting import account_of, shares
from gpipe_hpc.report.blocks import Curve
from gpipe_hpc.report.findings import findings_of
from gpipe_hpc.report.markdown import render_markdown
from gpipe_hpc.report.pace import slow_parts, timed_layers
from gpipe_hpc.report.record import read_record
from gpipe_hpc.report.sections import report_of
from gpipe_hpc.report.transfers import with_transfers
from gpipe_hpc.schedule import Costs, Timeline, build, mean_costs, schedule_of, simulate
from gpipe_hpc.trainer.traces.files import OutsideActivity, read_step, write_trace

FORWARD, BACKWARD = 0.010, 0.020
VOID = {"meta", "br"}


def timeline(forward=(FORWARD,) * 4, send=0.0):
    """Return a measured step of 4 stages on 4 ranks."""
    bare = build("gpipe", ranks=4, microbatches=4, recompute="never")
    costs = Costs(forward=list(forward), backward=BACKWARD, send=send)
    done = simulate(bare, costs)
    return Timeline(done.events, 4, 4, "gpipe")


def leave(folder, measured, second=None, *, took=None, more=None, stalls=(), logs="", around=()):
    """Write what a run of two replicas leaves: `took` by layer, of which each stage has two.

    `second`: the timeline of replica 1, where nothing is slow; without, both are the same.
    """
    folder.mkdir(exist_ok=True)
    write_trace([measured, second or measured], folder, 5, around=around)
    step = {"pipeline_s": measured.makespan, "reading_s": 0.001, "edge_s": 0.002}
    step |= {"clipping_s": 0.001, "optimizer_s": 0.003, "bubble": 0.3, **(more or {})}
    step["step_time_s"] = sum(v for n, v in step.items() if n != "bubble") + 0.001
    lines = [{"step": n, "loss": 2.0 / n, "samples_per_s": 10.0, **step} for n in range(1, 11)]
    lines += [{"step": 10, "validation_loss": 0.4}]
    lines += [{"step": n, "checkpoint_stall_s": seconds} for n, seconds in stalls]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    took = took or [FORWARD / 2] * 8
    rank = {"host": "<h&>", "busy_s": 0.1, "reading_s": 0.001, "peak_memory_bytes": 3_000_000}
    rank |= {"memory_before_bytes": 1_000_000, "planned_memory": None}
    kind = {"kind": "Block", "parameters": 6, "forward_flops": 8, "backward_flops": 16}
    summary = {
        **{"outcome": "done", "error": None, "began": "then", "written": "now"},
        **{"first_step": 0, "last_step": 10, "steps_asked": 10},
        "layout": {"ranks": 8, "stages": 4, "replicas": 2, "schedule": "gpipe", "microbatches": 4}
        | {"recompute": "never", "layers_of_stages": [2] * 4, "partition": "parameters"}
        | {"paces": []},
        "loss": {"first": 2.0, "last": 0.2, "validation": 0.4},
        "throughput": {"samples_per_s": 10.0, "tokens_per_s": None, "model_flops_per_s": 5e9}
        | {"share_of_peak": 0.4, "device_flops_per_s": 1e12},
        "step": {"bubble": 0.3},
        "traced_step": {"file": "trace/step_00000005.json"},
        "layers": [{"name": f"layers.{n}", **kind} for n in range(8)],
        "ranks": [
            rank
            | {"rank": r, "replica": r // 4, "stage_rank": r % 4, "stages": [r % 4]}
            | {
                "layers": [
                    {"layer": n, "forward_s": FORWARD / 2 if second and r > 3 else took[n]}
                    for n in (r % 4 * 2, r % 4 * 2 + 1)
                ]
            }
            for r in range(8)
        ],
        "advice": [
            {"settings": "pipeline.schedule=zb_h1 (without pipeline.options.x)", "gain": 0.05}
            | {"more_bytes": None, "assumes": "", "text": ""}
        ],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text("data:\n  workers: 0\ncheckpoint:\n  every: 3\n")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "rank0.log").write_text(logs)
    return folder


def first_finding(folder):
    record = read_record(folder)
    account = account_of(record)
    assert sum(account.parts.values()) == pytest.approx(account.step_s)
    return findings_of(record, account)[0], account


def test_parts_of_a_step_add_up_to_what_it_took(tmp_path):
    late = tuple((OutsideActivity("reading", -0.002, 0.004 * (r == 2)),) for r in range(8))
    folder = leave(tmp_path, timeline(send=0.003), stalls=[(4, 0.02), (7, 0.01)], around=late)
    record = read_record(folder)
    account = account_of(record)
    mean_s = record.steps[-1]["step_time_s"] + 0.03 / 9
    assert account.step_s == pytest.approx(mean_s)
    assert sum(account.parts.values()) == pytest.approx(mean_s)
    assert account.parts["checkpoint"] == pytest.approx(0.03 / 9)
    assert account.parts["optimizer"] == pytest.approx(0.004)
    assert min(account.parts.values()) >= -1e-12
    assert len(account.ranks) == 8
    for share in account.ranks:
        assert sum(share.seconds.values()) == pytest.approx(account.traced_s)


def test_a_step_is_divided_by_what_was_slow():
    """Transfers of 3 ms at 6 crossings; without them there is nothing but fill and drain."""
    free, slow = timeline(), timeline(send=0.003)
    for measured, waited_s in ((free, 0.0), (slow, slow.makespan - free.makespan)):
        step = read_of([measured])
        for share in shares(step):
            assert share.seconds["transfers"] == pytest.approx(waited_s)
            assert share.seconds["fill and drain"] == pytest.approx(3 * (FORWARD + BACKWARD))
            assert share.seconds["host"] == pytest.approx(0.0)


def read_of(replicas, around=()):
    from gpipe_hpc.trainer.traces.files import ReadStep

    return ReadStep(1, replicas, around)


def test_time_that_a_rank_lost_to_reading_or_to_its_host_is_called_so():
    measured = timeline()

    def later(event, by_s):
        return event._replace(start_s=event.start_s + by_s, end_s=event.end_s + by_s)

    rows = tuple(tuple(later(e, 0.5) for e in row) for row in measured.events)
    # Rank 0 read for 0.3 s longer than the pipeline of the other replica waited for.
    around = ((), (), (), (), (OutsideActivity("reading", 0.0, 0.5),), (), (), ())
    late = read_of([measured, replace(measured, events=rows)], around)
    assert shares(late)[4].seconds["reading data"] == pytest.approx(0.5)
    assert shares(late)[0].seconds["other replicas"] == pytest.approx(0.5)
    held = read_of([measured, replace(measured, events=rows)])
    assert shares(held)[4].seconds["host"] == pytest.approx(0.5), "its first action needs nobody"


def test_a_slow_layer_is_named_first_with_what_it_costs(tmp_path):
    """Layer 5 takes 8 ms longer than its likes: the report's gain is that of simulating both."""
    forward = [FORWARD, FORWARD, FORWARD + 0.008, FORWARD]
    took = [FORWARD / 2] * 8
    took[5] += 0.008
    slow, usual = timeline(forward), timeline()
    found, _ = first_finding(leave(tmp_path, slow, took=took))
    assert found.what.startswith("Layer 5 (Block) is slow: 2.60 times")
    assert found.gain_s == pytest.approx(slow.makespan - usual.makespan, rel=0.01)
    assert found.settings == ""


def test_a_slow_rank_is_named_first_with_what_it_costs(tmp_path):
    forward = [FORWARD, 2 * FORWARD, FORWARD, FORWARD]
    took = [FORWARD / 2] * 8
    took[2] = took[3] = FORWARD
    slow, usual = timeline(forward), timeline()
    found, _ = first_finding(leave(tmp_path, slow, usual, took=took))
    assert found.what.startswith("Rank 1 on <h&> is slow: 2.00 times")
    assert found.settings == "'pipeline.paces=[1,2,1,1]'"
    assert found.gain_s == pytest.approx(slow.makespan - usual.makespan, rel=0.01)


def change_summary(folder, **changes):
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_paces_are_advised_once_for_all_ranks_and_not_where_the_cut_knows_them(tmp_path):
    took = [FORWARD / 2] * 8
    took[2:4], took[6:8] = [FORWARD] * 2, [0.75 * FORWARD] * 2
    slow = timeline([FORWARD, 2 * FORWARD, FORWARD, 1.5 * FORWARD])
    folder = leave(tmp_path, slow, timeline(), took=took)
    record = read_record(folder)
    slow_parts = [e for e in findings_of(record, account_of(record)) if "is slow" in e.what]
    assert {each.settings for each in slow_parts} == {"'pipeline.paces=[1,2,1,1.5]'"}
    layout = json.loads((folder / "summary.json").read_text())["layout"]
    change_summary(folder, layout=layout | {"paces": [1.05, 2.0, 1.0, 1.4]})
    record = read_record(folder)
    slow_parts = [e for e in findings_of(record, account_of(record)) if "is slow" in e.what]
    assert slow_parts and not any(each.settings for each in slow_parts)
    change_summary(folder, layout=layout)
    with (folder / "config.yaml").open("a") as settings:
        settings.write("pipeline:\n  partition: [2, 2, 2, 2]\n")
    record = read_record(folder)
    slow_parts = [e for e in findings_of(record, account_of(record)) if "is slow" in e.what]
    assert slow_parts and not any(each.settings for each in slow_parts)


def test_a_slow_layer_is_named_where_layers_were_not_counted(tmp_path):
    folder = leave(tmp_path, timeline(), took=[FORWARD / 2] * 5 + [FORWARD] + [FORWARD / 2] * 2)
    summary = json.loads((folder / "summary.json").read_text())
    for rank in summary["ranks"][4:]:
        for layer in rank["layers"]:
            layer["forward_s"] = FORWARD / 2
    change_summary(folder, layers=None, ranks=summary["ranks"])
    record = read_record(folder)
    assert [each.layer for each in slow_parts(timed_layers(record))] == [5]
    found = findings_of(record, account_of(record))  # ended in a TypeError
    assert not any("Layer 5" in each.what for each in found)  # it costs no step anything


def test_of_a_run_that_failed_is_told_what_rank_0_knew(tmp_path):
    folder = leave(tmp_path, timeline())
    ranks = json.loads((folder / "summary.json").read_text())["ranks"]
    change_summary(folder, outcome="failed", error="PeerError: gone", ranks=ranks[:1])
    record = read_record(folder)
    assert not record.doubts
    assert "Failed after step 10 of 10" in render_markdown(report_of(record))
    for wrong in ([ranks[0], ranks[0]], [ranks[1], ranks[0]], [ranks[0] | {"rank": 8}]):
        change_summary(folder, ranks=wrong)
        assert "expected 8 ranks" in read_record(folder).doubts[0]


def test_a_summary_of_an_earlier_start_is_called_so(tmp_path):
    folder = leave(tmp_path, timeline())
    change_summary(folder, outcome="stopped", last_step=6)
    record = read_record(folder)
    assert record.is_overtaken
    assert [row["step"] for row in record.counted_steps] == [8, 9, 10]
    text = render_markdown(report_of(record))
    assert "A newer start has reached step 10 but has written no summary yet" in text
    assert "Another layout" not in text  # it was told of the earlier one
    change_summary(folder, outcome="running")
    assert not read_record(folder).is_overtaken
    for last_step, is_overtaken in ((11, False), (12, False), (37, True)):
        # It failed, and a newer one began at a checkpoint of step 9.
        change_summary(folder, outcome="failed", last_step=last_step)
        assert read_record(folder).is_overtaken == is_overtaken


def test_a_trace_of_an_earlier_start_is_left_out(tmp_path):
    folder = leave(tmp_path, timeline())
    change_summary(folder, outcome="running", traced_step=None, first_step=5)
    record = read_record(folder)
    assert record.traced is None
    assert record.doubts == ("the traced step is left out: step 5 is from an earlier start",)
    change_summary(folder, first_step=4)
    assert read_record(folder).traced is not None
    write_trace([timeline()] * 2, folder, 11)  # of one that had come further
    (folder / "trace" / "step_00000005.json").unlink()
    assert "step 11 is from an earlier start" in read_record(folder).doubts[0]


def test_a_checkpoint_in_the_background_is_one_with_two_stalls(tmp_path):
    folder = leave(tmp_path, timeline(), stalls=((3, 0.9), (6, 0.9), (9, 0.9)))
    with (folder / "metrics.jsonl").open("a") as lines:
        for step in (4, 7):
            lines.write(json.dumps({"step": step, "checkpoint_end_stall_s": 0.15}) + "\n")
    found, account = first_finding(folder)
    assert found.what == "Each checkpoint delays the run by 1 s"
    assert found.gain_s == pytest.approx(3.0 / 9) == account.parts["checkpoint"]


def test_replicas_in_markdown_have_one_scale_of_time(tmp_path):
    quick, slow = timeline(), timeline([2 * FORWARD] * 4)
    text = render_markdown(report_of(read_record(leave(tmp_path, quick, slow))))
    assert "replica 0, starting at 0 s:" in text and "replica 1, starting at 0 s:" in text
    rows = [line for line in text.splitlines() if line.startswith("rank ")]
    assert len(rows) == 8
    share = quick.makespan / slow.makespan
    assert len(rows[0]) - 7 == pytest.approx(96 * share, abs=1) and len(rows[4]) - 7 == 96
    assert "pink" not in text


@pytest.mark.parametrize(
    ("more", "stalls", "what", "settings", "gain_s"),
    [
        ({"reading_s": 0.2}, (), "Reading data", "data.workers=2", 0.2),
        (
            {"reading_s": 0.5, "reading_ahead_s": 0.2},
            (),
            "Reading data delays each step by 200 ms",
            "data.workers=2",
            0.2,
        ),
        (
            {},
            ((3, 0.9), (6, 0.9), (9, 0.9), (10, 5.0)),  # no step waits for the last
            "Each checkpoint delays the run by 900 ms",
            "checkpoint.in_background=true",
            0.3,
        ),
    ],
)
def test_what_holds_steps_up_is_named_first(tmp_path, more, stalls, what, settings, gain_s):
    found, _ = first_finding(leave(tmp_path, timeline(), more=more, stalls=stalls))
    assert found.what.startswith(what) and found.settings == settings
    assert found.gain_s == pytest.approx(gain_s, rel=0.01)


def test_flops_and_the_share_of_peak_are_drawn_over_time(tmp_path):
    """Only their means were shown."""
    rates = {"model_flops_per_s": 5e9, "share_of_peak": 0.4}
    known, unknown = (
        [
            block.title
            for section in report_of(
                read_record(leave(tmp_path / name, timeline(), more=more))
            ).sections
            for block in section.blocks
            if isinstance(block, Curve)
        ]
        for name, more in (("known", rates), ("unknown", {}))
    )
    drawn = ["FLOP/s of the model, without recomputation", "share of the devices' peak"]
    assert set(known) - set(unknown) == set(drawn)


def test_stragglers_are_told_with_their_steps(tmp_path):
    lines = leave(tmp_path, timeline()).joinpath("metrics.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    for row in rows:
        if 4 <= row["step"] <= 6:
            row |= {"straggles": 1.3 + row["step"] / 20, "straggling_rank": 3}
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = render_markdown(report_of(read_record(tmp_path)))
    assert "rank 3 computed up to 1.60 times as long as before" in text
    assert "reported from step 4 to 6" in text


def test_a_slow_link_is_named_with_its_ranks(tmp_path):
    free, slow = timeline(), timeline(send=0.02)
    found, account = first_finding(leave(tmp_path, slow))
    assert "Waiting for transfers" in found.what
    meeting_s = 0.002
    assert found.gain_s == pytest.approx(slow.makespan - free.makespan + meeting_s)
    assert account.parts["synchronization"] == pytest.approx(meeting_s)


def test_transfers_that_were_waited_for_are_drawn_where_they_were():
    drawn = with_transfers(timeline(send=0.003))
    sends = [e for row in drawn.events for e in row if e.action.op.value.startswith("SEND")]
    assert len(sends) > 6
    assert max(e.duration_s for e in sends) == pytest.approx(0.003)
    assert schedule_of(drawn).ranks == schedule_of(timeline()).ranks
    assert mean_costs(drawn) == mean_costs(timeline(send=0.003))


class Strict(HTMLParser):
    """Refuses tags that do not nest, and notes what a page would load."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.loads, self.inner = [], [], []

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.loads += [named[n] for n in ("src", "href") if n in named]
        if tag == "iframe":
            assert named["sandbox"] == "allow-scripts"
            self.inner.append(named["srcdoc"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def strict(page):
    parser = Strict()
    parser.feed(page)
    parser.close()
    assert parser.open == [] and parser.loads == []
    return parser


LOGS = """2026-01-01 10:00:00,001 INFO rank 0 stage 0 gpipe_hpc.train: run folder /r
2026-01-01 10:00:01,001 WARNING rank 0 stage 0 gpipe_hpc.train: step 1: skipped <script>
2026-01-01 10:00:02,001 WARNING rank 0 stage 0 gpipe_hpc.train: step 2: skipped <script>
2026-01-01 10:00:03,001 WARNING rank 0 stage 0 gpipe_hpc.train: step 3: skipped <script>
2026-01-01 10:00:04,001 WARNING rank 0 stage 0 gpipe_hpc.train: step 4: skipped <script>
2026-01-01 10:09:00,001 INFO rank 0 stage 0 gpipe_hpc.train: run folder /r
2026-01-01 10:09:01,001 INFO rank 0 stage 0 gpipe_hpc.train: resumed from /r/c: 4 steps done
a line of a traceback
"""


def test_the_page_needs_nothing_else_and_its_tags_nest(tmp_path):
    folder = leave(tmp_path / "run", timeline(send=0.003), logs=LOGS)
    path = write_report(compose_config([f"run.dir={folder}"]))
    assert path == folder / "report.html"
    page = path.read_text()
    parser = strict(page)
    assert len(parser.inner) == 1
    strict(parser.inner[0])
    assert "replica 1, gpipe" in parser.inner[0] and "a transfer that" in parser.inner[0]
    assert "&lt;h&amp;&gt;" in page and "skipped <script>" not in page
    assert "Started 2 times" in page and "http" not in page.replace("http-equiv", "")
    for word in ("FLOP/s", "40.0 %", "validation", "prefers-color-scheme", "viewport"):
        assert word in page


def test_what_rounding_leaves_is_no_part_of_a_step(tmp_path):
    """0.1 - 0.09999 in floats stood as `1.73e-11 us` in the table, and in the key of colours."""
    folder = leave(tmp_path / "run", timeline(send=0.003))
    account = account_of(read_record(folder))
    assert 0 < account.parts["imbalance"] < 1e-12, "this run no longer shows it"
    page = write_report(compose_config([f"run.dir={folder}"])).read_text()
    assert "<td>imbalance</td><td>0 s</td>" in page
    assert "imbalance</span>" not in page


def test_memory_of_each_rank_stands_beside_the_plan_and_its_parts(tmp_path):
    folder = leave(tmp_path, timeline())
    summary = json.loads((folder / "summary.json").read_text())
    parts = {"total_bytes": 4_000_000, "activation_bytes": 1_500_000}
    for rank, more in ((0, {}), (1, {"workspace_bytes": 700_000})):  # 0: as older runs left it
        summary["ranks"][rank]["planned_memory"] = parts | more
    (folder / "summary.json").write_text(json.dumps(summary))
    report = report_of(read_record(folder))
    (section,) = [each for each in report.sections if each.title == "Ranks and memory"]
    head, rows = section.blocks[0].head, section.blocks[0].rows
    told = [dict(zip(head, row, strict=True)) for row in rows]
    names = ("above start", "planned", "of plan", "of it activations", "workspace")
    assert [told[0][name] for name in names] == ["2.00 MB", "4.00 MB", "50.0 %", "1.50 MB", "-"]
    assert told[1]["workspace"] == "700 kB"
    assert [told[2][name] for name in names[1:]] == ["-"] * 4


def test_markdown_and_several_runs(tmp_path):
    """Runs with folders of the same name are told apart, and settings that differ are shown."""
    one = leave(tmp_path / "a", timeline(), logs=LOGS)
    (tmp_path / "other").mkdir()
    two = leave(tmp_path / "other" / "a", timeline(send=0.01))
    (two / "config.yaml").write_text("data:\n  workers: 4\n")
    runs = f"report.runs=[{one},{two}]"
    text = write_report(compose_config([runs, f"report.out={tmp_path}/both.md"])).read_text()
    assert "| data.workers | 0 | 4 |" in text and "| checkpoint.every | 3 | not set |" in text
    assert "a (1)" in text and "## a (2): Where the time of a step goes" in text
    assert all(line.count("|") > 2 for line in text.splitlines() if line.startswith("|"))
    page = write_report(compose_config([runs])).read_text()
    assert len(strict(page).inner) == 2
    assert "| skipped" not in text and "| 4 |" in text, "four alike are one event"


def test_a_run_that_goes_on_or_has_no_trace_has_a_report(tmp_path):
    folder = leave(tmp_path / "run", timeline())
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 11, "lo')
    for path in (folder / "trace").iterdir():
        path.unlink()
    text = write_report(
        compose_config([f"run.dir={folder}", f"report.out={folder}/r.MD"])
    ).read_text()
    assert "has written no summary yet" in text and "not divided by cause" in text


def damaged(value, rng, at=()):
    """Yield copies of a value with something wrong at one place each, and where."""
    for wrong in rng.sample(["x", None, [], {}, -1, 1.5, 10**6, [None], True], 2):
        yield wrong, at
    places = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        places = list(enumerate(value))[:1]
    for key, inner in places:
        for wrong, where in damaged(inner, rng, (*at, key)):
            copy = list(value) if isinstance(value, list) else dict(value)
            copy[key] = wrong
            yield copy, where


def test_no_damage_to_a_file_ends_a_report_without_a_word(tmp_path):
    """A summary with a text for a number ended in a traceback."""
    folder, rng = leave(tmp_path, timeline()), random.Random(7)
    num_doubts = num_tried = 0
    for name, share in (
        ("summary.json", 0.15),
        ("trace/step_00000005.json", 0.3),
        ("metrics.jsonl", 0.3),
    ):
        text = (folder / name).read_text()
        first, *others = text.splitlines() if name.endswith("l") else [text]
        for wrong, where in damaged(json.loads(first), rng):
            if rng.random() > share:
                continue
            (folder / name).write_text("\n".join([json.dumps(wrong), *others]) + "\n")
            record = read_record(folder)
            try:
                text_shown = render_markdown(report_of(record))
            except Exception as error:
                raise AssertionError(f"{name} {where}: {json.dumps(wrong)[:200]}") from error
            assert all(f"Could not be read: {doubt}." in text_shown for doubt in record.doubts)
            num_doubts += bool(record.doubts)
            num_tried += 1
        (folder / name).write_text(text)
    assert num_tried > 30 and num_doubts > num_tried / 3
    assert read_record(folder).doubts == ()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("summary.json", b'{"outcome": "do', "summary.json is damaged"),
        ("summary.json", b"{}", "expected a text as outcome, got None"),
        ("config.yaml", b"a: [\x00", "config.yaml is damaged"),
        ("trace/step_00000005.json", b'{"ranks": [[["0F0", 0', "the traced step is left out"),
        ("metrics.jsonl", b'{"step": 1, "loss": "x"}\n{"step": 1, "lo\n', "2 lines of metrics"),
        ("metrics.jsonl", bytes(range(256)), "lines of metrics.jsonl are damaged"),
    ],
)
def test_a_damaged_file_is_left_out_and_named(tmp_path, name, content, said):
    folder = leave(tmp_path, timeline())
    (folder / name).write_bytes(content)
    assert len(read_record(folder).doubts) == 1
    assert said in write_report(compose_config([f"run.dir={folder}"])).read_text()


def test_a_summary_of_other_ranks_than_the_trace_is_told(tmp_path):
    folder = leave(tmp_path, timeline())
    write_trace([timeline()], folder, 5)
    (doubt,) = read_record(folder).doubts
    assert doubt == (
        "the traced step is left out: it has 4 ranks, 4 stages and 1 replicas, the run 8 "
        "ranks, 4 stages and 2 replicas"
    )
    summary = json.loads((folder / "summary.json").read_text())
    del summary["ranks"][3]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "expected 8 ranks in order" in read_record(folder).doubts[0]


def test_a_run_that_ended_before_its_first_step_is_an_error_with_what_its_log_says(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text(
        "2026-01-01 10:00:00,001 ERROR rank 0 stage 0 gpipe_hpc.train: a disk is full\n"
    )
    said = (
        "not a run with a finished step: it has no metrics.*last error in its log: a disk is full"
    )
    with pytest.raises(ConfigError, match=said):
        read_record(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics.jsonl cannot be read \(Is a directory\)"):
        read_record(tmp_path)


def test_a_run_that_validated_and_took_no_step_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "validation_loss": 2.5}\n')
    text = render_markdown(report_of(read_record(tmp_path)))
    assert "2.5" in text and "What would make it faster" not in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "run.dir"),
        (["run.dir=nowhere"], "does not exist"),
        (["run.dir=."], "not a run with a finished step"),
        (["run.dir=a", "report.runs=[b]"], "report.runs"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, monkeypatch, settings, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        write_report(compose_config(settings))


def test_a_trace_keeps_what_ranks_did_around_the_pipeline(tmp_path):
    measured = timeline()
    row = (OutsideActivity("reading", -0.5, 0.25), OutsideActivity("optimizer", 1.0, 1.5))
    path = write_trace([measured], tmp_path, 5, around=[row, (), (), ()])
    step = read_step(path)
    assert step.step == 5 and step.around == (row, (), (), ())
