"""The command that draws: formats, files, refusals, and what it does without."""

import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from PIL import Image

from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.draw import draw
from gpipe_hpc.draw.pictures import columns_of_terminal, format_of, write_picture
from gpipe_hpc.errors import ConfigError, DataError, ScheduleError
from gpipe_hpc.schedule import Costs, Timeline, build, simulate
from gpipe_hpc.trainer.traces.files import write_trace

SMALL = ["pipeline.schedule=zb_v", "pipeline.stages=4", "pipeline.microbatches=4"]


def drawn(*overrides):
    return draw(compose_config([*SMALL, *overrides]))


@pytest.fixture
def run_folder(tmp_path):
    """Return the folder of a run whose newest measured step was twice as slow as the first."""
    for step, pace in ((2, 1e-3), (3, 2e-3)):
        schedule = build("one_f_one_b", ranks=2, microbatches=4)
        costs = Costs(forward=pace, backward=2 * pace, send=pace / 2)
        measured = simulate(schedule, costs)
        run = Timeline(measured.events, 2, 4, "one_f_one_b")
        write_trace([run], tmp_path, step)
    return tmp_path


def test_text_has_picture_and_memory():
    text = drawn("pipeline.recompute=never")
    assert text.startswith("rank 0 0F00F10F2") and "bubble" in text
    assert "peaks 5 6 7 8" in text.splitlines()[-1]


def test_svg_is_well_formed():
    root = ET.fromstring(drawn("draw.format=svg", "draw.width=700"))
    assert root.get("width") == "700"


def test_png_shows_the_boxes_in_their_colours():
    image = Image.open(io.BytesIO(drawn("draw.format=png", "draw.width=960")))
    assert image.format == "PNG" and image.width == 2 * 960
    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    for wanted in ("#a8d4ef", "#2370b4", "#8b4381", "#ececec"):
        assert tuple(bytes.fromhex(wanted[1:])) in colours


def test_html_and_trace_hold_the_schedule():
    assert '"0F*"' in drawn("draw.format=html")
    events = json.loads(drawn("draw.format=trace"))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f", "C"}
    trace = json.loads(drawn("draw.format=trace", "draw.costs.send=[1,1,1,1,1,1,1,1]"))
    assert "b" in {event["ph"] for event in trace["traceEvents"]}


def test_costs_may_differ_by_stage_and_backward_is_the_sum_of_its_halves():
    def makespan(*overrides):
        one = ["pipeline.schedule=gpipe", "pipeline.stages=2", "pipeline.microbatches=1"]
        text = drawn(*one, "pipeline.recompute=never", *overrides)
        return float(text.split("makespan ")[1].split(",")[0])

    assert makespan() == 6
    assert makespan("draw.costs.forward=[1,4]") == 9
    assert makespan("draw.costs.input_gradient=3") == 10
    assert makespan("draw.costs.backward=1", "draw.costs.send=0.5") == 5


def test_reductions_and_gatherings_have_their_time():
    """They were in the table, and took none: nothing of them was seen before a run."""
    one = ["pipeline.stages=2", "pipeline.microbatches=1", "pipeline.recompute=never"]
    two = ["draw.format=trace", "draw.costs.reduction=4", "draw.buckets=2", *one]
    named = {event["name"] for event in json.loads(drawn(*two))["traceEvents"]}
    assert {"0REDUCE_GRAD0", "0REDUCE_GRAD1", "1REDUCE_GRAD1"} <= named
    assert not any("UNSHARD" in name for name in named)
    flat = [*two, "outer.shard=flat", "draw.costs.gather=1", "pipeline.replicas=2"]
    named = {event["name"] for event in json.loads(drawn(*flat))["traceEvents"]}
    assert {"0UNSHARD0", "0UNSHARD1", "1UNSHARD0"} <= named
    with pytest.raises(ConfigError, match=r"draw\.buckets"):
        drawn("draw.buckets=0")


def test_further_schedules_stand_below_on_one_scale():
    text = drawn("pipeline.schedule=gpipe", "draw.compare=[one_f_one_b]", "draw.width=100")
    pictures = [line for line in text.splitlines() if line.startswith("rank 0 F0")]
    assert len(pictures) == 2
    assert "gpipe:" in text and "one_f_one_b:" in text


def test_a_run_is_drawn_above_its_simulation(run_folder):
    text = drawn(f"run.dir={run_folder}")
    first, second = text.index("one_f_one_b, measured"), text.index("one_f_one_b, simulated")
    assert first < second < text.index("mean of ranks (ms)")
    # Four micro-batches of 6 ms, one more of fill and drain; measured, two transfers of 1 ms each.
    assert "makespan 30 ms" in text
    table = [line.split() for line in text.splitlines()[-4:]]
    assert [line[0] for line in table] == ["F", "B", "after", "makespan"]
    assert float(table[-1][-1]) == pytest.approx(table_sum(table[:-1]), abs=0.01) != 0


def table_sum(lines):
    return sum(float(line[-1]) for line in lines)


@pytest.mark.parametrize("name", ["svg", "html"])
def test_pictures_of_a_run_have_both_and_the_table(run_folder, name):
    picture = drawn(f"run.dir={run_folder}", f"draw.format={name}")
    for wanted in (
        "one_f_one_b, measured",
        "simulated from measured costs",
        "after the last action",
    ):
        assert wanted in picture


def test_trace_of_a_run_has_both_as_processes(run_folder):
    events = json.loads(drawn(f"run.dir={run_folder}", "draw.format=trace"))["traceEvents"]
    assert sum(event["name"] == "process_name" for event in events) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draw.format=pdf", "draw.format, expected one of auto, text, svg, png, html, trace"),
        ("draw.width=0", "draw.width"),
        ("draw.costs.forward=-1", "draw.costs.forward, expected a time of 0 or more"),
        ("draw.costs.forward=[1,x]", "draw.costs.forward"),
        ("draw.costs.send=null", "draw.costs.send"),
        ("draw.costs.backward=[]", "draw.costs.backward"),
        ("draw.compare=[nonesuch]", "draw.compare, expected one of gpipe"),
    ],
)
def test_settings_that_cannot_be_drawn_are_refused(override, message):
    config = compose_config([*SMALL, override])
    with pytest.raises(ConfigError, match=message):
        draw(config)
    with pytest.raises(ConfigError, match=message):
        check_config(config, world_size=4)


def test_costs_of_parts_that_the_stages_do_not_divide_are_refused():
    with pytest.raises(ScheduleError, match=r"forward has 3 values.*the 8 stages"):
        drawn("draw.costs.forward=[1,2,3]")


@pytest.mark.parametrize("costs", [[], ["draw.costs.forward=[1,2,1,1]", "draw.costs.send=0.5"]])
def test_compared_schedules_are_of_one_model_on_the_same_ranks(costs):
    """dualpipe_v, whose 8 stages cost as much each as the 4 of gpipe, looked twice as long."""
    text = drawn(
        "pipeline.schedule=gpipe",
        "pipeline.recompute=never",
        "pipeline.microbatches=8",
        "draw.compare=[dualpipe_v,interleaved,chimera]",
        *costs,
    )
    makespans = [
        float(line.split("makespan ")[1].split(",")[0])
        for line in text.splitlines()
        if "makespan" in line
    ]
    if not costs:
        table = draw(compose_config([*SMALL, "pipeline.microbatches=8", "draw.format=table"]))
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        times = {row[0]: float(row[1]) for row in rows[2:]}
        named = ["gpipe", "dualpipe_v", "interleaved (stages_per_rank=2)", "chimera"]
        assert makespans == [times[name] for name in named] == [33, 27, 28.5, 30]
    else:
        # The busiest rank of gpipe has the same work under none less than its mean.
        assert min(makespans) >= 8 * (5 / 4 + 2)
        assert max(makespans) < 1.6 * makespans[0]


def test_an_empty_out_is_standard_output(capsys):
    """It was taken for a file in the folder at hand, which is none."""
    write_picture("a picture", "")
    assert capsys.readouterr().out == "a picture\n"


def test_a_folder_without_measured_steps_says_how_to_get_one(tmp_path):
    with pytest.raises(DataError, match=r"trace\.steps=1"):
        drawn(f"run.dir={tmp_path}")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    """It advised to run with traces, whatever was wrong with the name."""
    with pytest.raises(ConfigError, match=r"bad run\.dir: '.*/nope' does not exist"):
        draw(compose_config([f"run.dir={tmp_path}/nope"]))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"'.*/file' is not a folder"):
        draw(compose_config([f"run.dir={tmp_path}/file"]))


def test_pictures_go_to_a_file_or_to_standard_output(tmp_path, capsysbinary):
    write_picture("text \u00b7", str(tmp_path / "a.txt"))
    write_picture(b"\x89PNG", str(tmp_path / "a.png"))
    assert (tmp_path / "a.txt").read_text("utf-8") == "text \u00b7"
    assert (tmp_path / "a.png").read_bytes() == b"\x89PNG"
    assert capsysbinary.readouterr().out.decode().splitlines() == [
        f"wrote {tmp_path / name}" for name in ("a.txt", "a.png")
    ]
    write_picture(b"\x89PNG", None)
    assert capsysbinary.readouterr().out == b"\x89PNG"


def test_a_text_takes_the_width_of_the_terminal_that_shows_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert columns_of_terminal("file.txt") is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert columns_of_terminal(None) == columns_of_terminal("") == 60
    assert columns_of_terminal("file.txt") is None
    text = draw(compose_config(SMALL), columns=60)
    assert max(map(len, text.splitlines())) <= 60
    assert max(map(len, draw(compose_config(SMALL)).splitlines())) > 60


def test_a_terminal_gets_no_bytes(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(ConfigError, match=r"draw\.out=FILE"):
        write_picture(b"\x89PNG", None)


def test_drawing_loads_no_torch(repository, tmp_path):
    """Neither the picture of a schedule nor that of a run waits seconds for it."""
    timeline = simulate(build("gpipe", ranks=2, microbatches=2), Costs(forward=1, backward=2))
    write_trace([timeline], tmp_path, 1)
    code = (
        "import sys\n"
        "from gpipe_hpc.config import compose_config\n"
        "from gpipe_hpc.draw import draw\n"
        "for name in ('text', 'svg', 'png', 'html', 'trace'):\n"
        "    draw(compose_config(['draw.format=' + name], reads_data=False))\n"
        f"draw(compose_config(['run.dir={tmp_path}'], reads_data=False))\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0


def test_table_names_every_schedule_and_what_a_search_gains():
    overrides = ["draw.format=table", "pipeline.stages=4", "pipeline.microbatches=8"]
    table = draw(compose_config(overrides))
    assert {"gpipe", "one_f_one_b", "zb_h1", "dualpipe_v"} <= {
        line.split("|")[1].split()[0] for line in table.splitlines()[2:]
    }
    assert "| 33 " in table.replace("        33 ", " 33 ") and "Searched" not in table
    few = ["draw.format=table", "pipeline.stages=2", "pipeline.microbatches=4"]
    unequal = draw(compose_config([*few, "draw.costs.forward=[1,1.6]"]))
    assert "Searched orders" in unequal and "mirrored" in unequal


def format_for(out):
    return format_of(compose_config([f"draw.out={out or 'null'}"], reads_data=False))


@pytest.mark.parametrize(
    ("out", "form"),
    [
        *((None, "text"), ("", "text"), ("a.d/plain", "text"), ("a.SVG", "svg"), ("a.png", "png")),
        *(("a.html", "html"), ("a.json", "trace"), ("a.md", "table"), ("a.txt", "text")),
    ],
)
def test_the_ending_of_the_file_chooses_the_format(out, form):
    """`draw.out=a.png` alone wrote a text into a.png."""
    assert format_for(out) == form
    assert (
        format_of(
            compose_config(["draw.format=html", f"draw.out={out or 'null'}"], reads_data=False)
        )
        == "html"
    )


def test_an_ending_that_is_no_format_is_refused():
    with pytest.raises(ConfigError, match=r"draw.out, expected a file that ends in one of .*jpg"):
        format_for("a.jpg")


def beside(run_folder, *words):
    names = {word.partition("=")[0] for word in words}
    return draw(compose_config([f"run.dir={run_folder}", "draw.width=90", *words]), given=names)


def test_other_schedules_are_simulated_with_what_a_run_measured(run_folder):
    """They were passed over in silence, later refused, though the run's costs were there."""
    text = beside(run_folder, "draw.compare=[gpipe,zb_h1]")
    heads = [line for line in text.splitlines() if line.endswith(":") and "simulated" in line]
    assert heads == [
        "one_f_one_b, simulated from measured costs:",
        "gpipe, simulated from measured costs:",
        "zb_h1, simulated from measured costs (I and W as halves of B):",
    ]
    # Forwards of 2 ms, backwards of 4: four micro-batches, and one more of fill and drain.
    spans = [
        line.split("makespan ")[1].split(",")[0] for line in text.splitlines() if "span " in line
    ]
    assert spans[1:3] == ["30 ms", "30 ms"] and float(spans[3].split()[0]) < 30


def test_a_schedule_that_is_named_beside_a_run_is_one_to_compare(run_folder):
    """`draw run.dir=RUN pipeline.schedule=zb_v` drew the run as if nothing had been asked."""
    looped = ("pipeline.schedule=interleaved", "pipeline.options.stages_per_rank=2")
    assert "interleaved, simulated from measured costs" in beside(run_folder, *looped)
    assert "gpipe" not in beside(run_folder)
    searched = beside(run_folder, "pipeline.schedule=auto", "pipeline.options.trials=2")
    assert "auto, simulated from measured costs" in searched


def test_what_a_run_has_of_its_own_is_refused_beside_it(run_folder):
    for word in ("pipeline.stages=8", "pipeline.microbatches=3", "draw.costs.forward=2"):
        with pytest.raises(ConfigError, match=r"expected no value together with run\.dir"):
            beside(run_folder, word)


def test_the_command_looks_at_what_was_typed(run_folder):
    words = [f"run.dir={run_folder}", "pipeline.schedule=zb_v", "draw.width=90"]
    done = subprocess.run(
        [sys.executable, "-m", "gpipe_hpc.draw", *words], capture_output=True, text=True, check=True
    )
    assert "zb_v, simulated from measured costs" in done.stdout


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("failed", "it failed after step 3, and only successful runs write timelines"),
        ("running", "it is still running, or was killed after step 3"),
        ("done", "run with trace.steps=1 or more"),
    ],
)
def test_a_run_without_a_timeline_says_why(tmp_path, outcome, said):
    """A run that had failed was told to set trace.steps, which was 20."""
    (tmp_path / "summary.json").write_text(json.dumps({"outcome": outcome, "last_step": 3}))
    with pytest.raises(DataError, match=said):
        beside(tmp_path)
