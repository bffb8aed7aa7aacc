"""The workload of collectives: what its tables say; no test measures time."""

import json

import pytest

from gpipe_hpc.bench.__main__ import main
from gpipe_hpc.bench.collectives.figures import Found, Timing, advice, table
from gpipe_hpc.bench.collectives.plot import draw
from gpipe_hpc.bench.collectives.point import time_all
from gpipe_hpc.comm.collectives.costs import FORMS, Link
from gpipe_hpc.comm.collectives.fitting import Fit
from gpipe_hpc.comm.collectives.menu import BACKEND
from gpipe_hpc.comm.device import HostDevice
from gpipe_hpc.comm.joining.start import start_world
from gpipe_hpc.comm.processes import ProcessWorld

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
    line = table([Found(4, (timing,), FIT)]).splitlines()[2]
    assert line == "| 4 | all_reduce | 8000000 | ring | 2 | 2-2 |  | 4 | 6 |"


def test_tables_say_what_failed_what_the_tuner_picks_and_how_long_buckets_should_be():
    found = [Found(2, all_timings(2, [1024]), FIT), Found(4, failed="exit code 1, a|b")]
    lines = table(found).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "none: exit code 1, a/b" in lines[-1]
    told = advice(found)
    assert "2 ranks: alpha 100 us" in told and "within 12 %" in told
    # 2 start-ups of 100 us are 5 % of what 19 times their time brings over.
    assert "outer.bucket_bytes=3800000" in told
    assert "takes 0 % longer than our fastest" in told  # all take as long
    chain = Timing(2, "broadcast", "chain", 1024, (1e-3,), 1024, 1.5e-3)
    slower = [
        t for t in found[0].timings if (t.collective, t.algorithm) == ("broadcast", "binomial")
    ]
    assert "takes 100 % longer" in advice([Found(2, (chain, *slower), FIT)])
    assert told.count("\n| 2 | ") == len(FORMS) and "backend ms" in told


def test_a_plot_has_a_row_for_each_number_of_ranks(tmp_path):
    assert not draw([Found(2, failed="so")], tmp_path / "none.svg")
    found = [Found(n, all_timings(n, [1024, 4096]), FIT) for n in (2, 4)]
    assert draw(found, tmp_path / "two.svg")
    picture = (tmp_path / "two.svg").read_text()
    assert all(f'id="axes_{number}"' in picture for number in range(1, 2 * len(FORMS) + 1))


def test_every_algorithm_is_timed_and_what_was_found_survives_json(processes, tmp_path):
    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        return json.dumps(time_all(world, [64, 40_000], 2).told())

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
    assert all((t.block_bytes > 0) == (t.algorithm == "chain") for t in found.timings)
    assert min(found.fit.link) >= 0 and found.fit.link.start_s > 0


def test_many_ranks_time_sums_over_their_few_connections(processes, tmp_path):
    def body(rank):
        world = ProcessWorld(HostDevice(), 60.0, meshed=3)
        return json.dumps(time_all(world, [400], 1).told())

    told, *others = processes(4, body, tmp_path)
    timings = Found.of(json.loads(told)).timings
    assert others == [told] * 3
    assert {t.collective for t in timings if t.algorithm == BACKEND} == FORMS.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench.workloads=[collective]"], "did you mean collectives"),
        (["bench.workloads=[]"], "any of steps, collectives"),
        (["bench.workloads=[collectives]", "bench.ranks=[1]"], "2 or more for collectives"),
        (["bench.workloads=[collectives]", "bench.message_bytes=[0]"], "message_bytes"),
        (["bench.workloads=[collectives]", "bench.repeats=0"], "repeats"),
    ],
)
def test_settings_that_time_nothing_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_and_keeps_its_tables(start, tmp_path):
    words = ["bench.workloads=[collectives]", "bench.ranks=[2]", "bench.message_bytes=[64,4096]"]
    run = start(*words, "bench.repeats=2", f"bench.out={tmp_path}/kept", module="gpipe_hpc.bench")
    assert run.wait(100).code == 0, run.output
    assert "| 2 | all_reduce | 4096 | rank_order |" in run.output
    assert "the tuner picks" in run.output
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept >= {"collectives.json", "collectives.md"}
