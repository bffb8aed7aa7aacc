"""The commands that compare algorithms: what their tables and pictures say; none measures time."""

import json
import xml.etree.ElementTree as ET

import pytest

from experiments.outer.collectives.__main__ import main
from experiments.outer.collectives.costs import FORMS, PIPELINED, Link
from experiments.outer.collectives.figures import (
    Found,
    Timing,
    advice,
    crossover_lines,
    measured_crossovers,
    table,
)
from experiments.outer.collectives.fitting import Fit
from experiments.outer.collectives.measuring import time_all
from experiments.outer.collectives.menu import BACKEND
from experiments.outer.collectives.picture import COLOURS, DARK, INK, LIGHT, with_grounds
from experiments.outer.collectives.plot import draw
from gpipe_hpc.bench.__main__ import main as bench
from gpipe_hpc.comm.world.start import start_world

FIT = Fit(Link(1e-4, 1e-9, 0.0), 0.125)


def all_timings(ranks, sizes):
    return tuple(
        Timing(ranks, collective, name, size, (2e-3, 1e-3, 4e-3), form_s=1.5e-3)
        for collective, names in FORMS.items()
        for size in sizes
        for name in (BACKEND, *names)
    )


def test_bandwidths_are_those_of_nccl_tests():
    timing = Timing(4, "all_reduce", "ring", 8_000_000, (2e-3,))
    assert timing.algorithm_bytes_per_s == pytest.approx(4e9)
    assert timing.bus_bytes_per_s == pytest.approx(6e9)
    assert Timing(4, "all_gather", "ring", 8_000_000, (2e-3,)).bus_bytes_per_s == pytest.approx(3e9)
    line = table([Found(4, 2, (timing,), FIT)]).splitlines()[2]
    assert line == "| 4 | all_reduce | 8000000 | ring | 2 | 2-2 |  | 4 | 6 |"


def test_tables_say_what_the_tuner_picks_and_how_long_buckets_should_be():
    found = [Found(2, 1, all_timings(2, [1024]), FIT)]
    assert len({line.count("|") for line in table(found).splitlines()}) == 1
    said = advice(found)
    assert "2 ranks: alpha 100 us" in said and "within 12 %" in said
    # 2 start-ups of 100 us are 5 % of what 19 times their time brings over.
    assert "outer.bucket_bytes=3800000" in said
    assert "takes 0 % longer than our fastest" in said  # all take as long
    assert said.count("\n| 2 | ") == len(FORMS) and "backend ms" in said


def curve(name, seconds):
    sizes = (1024, 4096, 16384)
    return [
        Timing(4, "broadcast", name, size, (took,) * 9)
        for size, took in zip(sizes, seconds, strict=True)
    ]


def test_a_measured_crossover_is_where_two_lines_cross_in_the_picture():
    """From 1 : 2 to 2 : 1 in the logarithms of both, it is half-way between two sizes."""
    timings = curve("binomial", (1e-3, 1e-3, 4e-3)) + curve("chain", (3e-3, 2e-3, 2e-3))
    found = Found(4, 2, tuple(timings), FIT)
    (cross,) = measured_crossovers(found, "broadcast")
    noisy = [
        Timing(4, "broadcast", name, 16384, (took,) * 5 + (3e-3,) * 4)
        for name, took in (("binomial", 4e-3), ("chain", 2e-3))
    ]
    blurred = [each for each in timings if each.num_bytes < 16384] + noisy
    assert measured_crossovers(Found(4, 2, tuple(blurred), FIT), "broadcast") == []
    assert (cross.before, cross.after, cross.num_bytes) == ("binomial", "chain", 8192)
    assert "broadcast, measured: binomial -> chain at 8 KiB" in crossover_lines([found])


def test_a_picture_has_a_panel_for_each_case_its_crossovers_and_words(tmp_path):
    timings = curve("binomial", (1e-3, 1e-3, 4e-3)) + curve("chain", (3e-3, 2e-3, 2e-3))
    draw([Found(4, 2, tuple(timings), FIT)], tmp_path / "one.svg")
    picture = (tmp_path / "one.svg").read_text()
    root = ET.fromstring(picture)
    words = root.find("{http://www.w3.org/2000/svg}desc").text
    assert "binomial -> chain at 8 KiB" in words and "fastest are binomial with 1 ms" in words
    assert ">8 KiB</text>" in picture and INK not in picture.partition("</style>")[2]
    found = [Found(n, 2, all_timings(n, [1024, 4096]), FIT) for n in (2, 4)]
    draw(found, tmp_path / "all.svg")
    picture = (tmp_path / "all.svg").read_text()
    assert all(f'id="axes_{number}"' in picture for number in range(1, 2 * len(FORMS) + 1))


def luminance(colour):
    """Return the relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_lines_stand_out_from_a_light_and_from_a_dark_page():
    for colour in COLOURS:
        for ground in (LIGHT, DARK):
            low, high = sorted((luminance(colour), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= 3, (colour, ground)
    assert "prefers-color-scheme:dark" in with_grounds("<svg></svg>", "a", "b")


@pytest.mark.slow
def test_every_algorithm_is_timed_and_what_was_found_survives_json(processes, tmp_path):
    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        return json.dumps(time_all(world, list(FORMS), [64, 40_000], 2, 2).as_json())

    one, other = processes(2, body, tmp_path)
    assert json.loads(one) == json.loads(other)
    found = Found.of(json.loads(one))
    cases = {(t.collective, t.algorithm, t.num_bytes) for t in found.timings}
    assert cases == {
        (collective, name, size)
        for collective, names in FORMS.items()
        for name in (BACKEND, *names)
        for size in (64, 40_000)
    }
    # A rank has as many elements as another: 4 x 2 divides both.
    assert all(len(t.seconds) == 2 and t.median_s > 0 for t in found.timings)
    assert all((t.form_s is None) == (t.algorithm == BACKEND) for t in found.timings)
    assert all(bool(t.block_bytes) == (t.algorithm in PIPELINED) for t in found.timings)
    assert min(found.fit.link) >= 0 and found.fit.link.start_s > 0


@pytest.mark.slow
def test_the_command_prints_and_keeps_its_tables(tmp_path, capsys):
    words = ["broadcast", "--ranks=2", "--bytes=64,4096", "--repeats=2", f"--out={tmp_path}/kept"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "| 2 | broadcast | 4096 | scatter_doubling |" in said and "all_reduce" not in said
    assert "2 ranks, broadcast, computed: " in said
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"times.json", "table.md", "times.svg"}


def test_what_is_predicted_over_a_link_is_printed_and_drawn(tmp_path, capsys):
    words = ["predict", "--collectives=broadcast", "--ranks=16", "--group=4", "--latency=5e-6"]
    assert main([*words, "--bandwidth=10e9", f"--out={tmp_path}/forms.svg"]) == 0
    said = capsys.readouterr().out
    # 4 start-ups of 5 us for the first row of binomial: 256 bytes add nothing to speak of.
    assert "| binomial | 0.0201 |" in said
    words = (tmp_path / "forms.svg").read_text()
    assert said.count("- from ") == words.count("in place of") > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["measure", "--ranks=1"], "whole numbers from 2 up"),
        (["measure", "--bytes=a"], "whole numbers from 4 up"),
        (["broadcast", "--collectives=gather"], "some of all_reduce, broadcast"),
        (["measured"], "invalid choice: 'measured'"),
    ],
)
def test_options_that_time_nothing_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bench.workloads=[collectives]", "python -m experiments.outer.collectives measure"),
        ("bench.workloads=[collective]", "expected [steps], got '[collective]'"),
        ("bench.workloads=[]", "expected [steps]"),
        ("bench.repeats=3", "experiments.outer.collectives measure takes --repeats"),
        ("bench.message_bytes=[4]", "takes --bytes"),
    ],
)
def test_bench_names_the_command_that_took_the_place_of_its_workload(
    word, message, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["bench", word])
    with pytest.raises(SystemExit) as ended:
        bench()
    assert ended.value.code == 2 and message in capsys.readouterr().err
