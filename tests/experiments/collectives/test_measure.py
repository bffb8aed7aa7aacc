"""The commands that compare algorithms: the content of their tables. No test measures time."""

import json

import pytest

from experiments.outer.collectives.__main__ import main
from experiments.outer.collectives.costs import FORMS, PIPELINED, Link
from experiments.outer.collectives.figures import (
    Measurement,
    Timing,
    advice,
    table,
)
from experiments.outer.collectives.fitting import Fit
from experiments.outer.collectives.measuring import time_all
from experiments.outer.collectives.menu import BACKEND
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
    line = table([Measurement(4, 2, (timing,), FIT)]).splitlines()[2]
    assert line == "| 4 | all_reduce | 8000000 | ring | 2 | 2-2 |  | 4 | 6 |"


def test_tables_have_a_row_for_each_timing_and_advice_recommends_a_bucket_size():
    found = [Measurement(2, 1, all_timings(2, [1024]), FIT)]
    assert len({line.count("|") for line in table(found).splitlines()}) == 1
    said = advice(found)
    assert "2 ranks: alpha 100 us" in said and "within 12 %" in said
    # 2 start-ups of 100 us are 5 % of what 19 times their time brings over.
    assert "outer.bucket_bytes=3800000" in said


@pytest.mark.long
def test_every_algorithm_is_timed_and_what_was_found_survives_json(processes, tmp_path):
    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        return json.dumps(time_all(world, list(FORMS), [64, 40_000], 2, 2).as_json())

    one, other = processes(2, body, tmp_path)
    assert json.loads(one) == json.loads(other)
    found = Measurement.of(json.loads(one))
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


@pytest.mark.long
def test_the_command_prints_and_keeps_its_tables(tmp_path, capsys):
    words = ["measure", "--collectives=broadcast", "--ranks=2", "--bytes=64,4096", "--repeats=2"]
    assert main([*words, f"--out={tmp_path}/kept"]) == 0
    said = capsys.readouterr().out
    assert "| 2 | broadcast | 4096 | scatter_doubling |" in said and "all_reduce" not in said
    assert "- 2 ranks: alpha " in said
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"times.json", "table.md"}


def test_closed_forms_over_a_link_and_their_crossovers_are_printed(capsys):
    words = ["predict", "--collectives=broadcast", "--ranks=16", "--group=4", "--latency=5e-6"]
    assert main([*words, "--bandwidth=10e9"]) == 0
    said = capsys.readouterr().out
    # 4 start-ups of 5 us for the first row of binomial: 256 bytes add nothing to speak of.
    assert "| binomial | 0.0201 |" in said
    assert "- from " in said and " on: chain" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["measure", "--ranks=1"], "expected comma-separated whole numbers from 2 up"),
        (["measure", "--bytes=a"], "expected comma-separated whole numbers from 4 up"),
        (["measure", "--collectives=gather"], "some of all_reduce, broadcast"),
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
