"""The sweeps of experiments/characterisation: interleaved rounds, and a spread in each row."""

from experiments.characterisation.__main__ import MODEL, on_file, page
from experiments.characterisation.measuring import measure_all, table
from experiments.characterisation.sweeps import sweeps
from gpipe_hpc.bench.figures import PointResult
from gpipe_hpc.config import check_config, compose_config


def test_every_point_is_a_run_that_can_work():
    """Their settings compose and pass all checks, for as many ranks as they have."""
    for setting in (each for sweep in sweeps() for each in sweep.settings):
        words = [*MODEL, *setting.words, *setting.point.overrides]
        config = compose_config(words)
        check_config(config, setting.point.ranks)
        assert config.comm.backend == setting.point.backend


def test_rounds_go_over_all_points_in_turn(capsys):
    first, second, *_ = sweeps()
    order = []

    def measure(setting):
        order.append(setting.name)
        if setting.name == "4 threads":
            return PointResult(setting.point, failed="exit code 1, no | cores")
        return PointResult(setting.point, steps_s=(1.0 * len(order), 1.0 * len(order), 9.0))

    found = measure_all([first, second], 2, measure)
    names = [each.name for sweep in (first, second) for each in sweep.settings]
    assert order == [*names, *names]
    assert found[0][0].rounds_s == [1.0, 1.0 + len(names)]
    assert found[0][0].spread == len(names) / (1 + len(names) / 2)
    lines = table(found[1]).splitlines()
    assert lines[2].split("|")[3].strip() == "2" and lines[2].endswith("| 1.00 |")
    assert lines[-1] == "| 4 threads | none: exit code 1, no / cores | 0 | | | |"
    told = page([first, second], found, ["machine", "another"])
    assert told.count("## ") == 2 and "another\n\n| | ms a step" in told
    assert "round 2/2, 1 threads" in capsys.readouterr().err


def test_what_is_on_file_is_of_the_points_that_there_are():
    for lines, told in on_file(sweeps()).values():
        assert told and all(each.rounds_s for each in lines)
