"""Schedule names of papers and other frameworks, and sizes with units."""

import pytest

from gpipe_hpc import Pipeline
from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.errors import ConfigError, ScheduleError
from gpipe_hpc.schedule import build, canonical_schedule, schedule_names


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("1f1b", "one_f_one_b"),
        ("1F1B", "one_f_one_b"),
        ("GPipe", "gpipe"),
        ("ZB-H1", "zb_h1"),
        ("ZBV", "zb_v"),
        ("DualPipeV", "dualpipe_v"),
        ("Interleaved1F1B", "interleaved"),
        ("nonsense", "nonsense"),
    ],
)
def test_schedule_names_of_papers_are_accepted(given, meant):
    assert canonical_schedule(given) == meant
    assert compose_config([f"pipeline.schedule={given}"]).pipeline.schedule == meant
    if meant in schedule_names():
        assert (
            build(given, ranks=2, microbatches=4).ranks
            == build(meant, ranks=2, microbatches=4).ranks
        )


def test_canonical_schedule_name_does_not_change():
    assert [canonical_schedule(name) for name in schedule_names()] == list(schedule_names())


def test_unknown_schedule_suggests_the_nearest_name():
    with pytest.raises(ScheduleError, match="did you mean one_f_one_b"):
        build("one_f_one_bee", ranks=2, microbatches=4)
    with pytest.raises(ConfigError, match="did you mean one_f_one_b"):
        check_config(compose_config(["pipeline.schedule=one_f_one_bee"]), 1)


@pytest.mark.parametrize(("given", "meant"), [("1f1d", "one_f_one_b"), ("zbv1", "zb_v")])
def test_unknown_schedule_near_an_alias_suggests_its_schedule(given, meant):
    """Regression: 1f1d suggested nothing, because it is near the alias 1F1B only."""
    with pytest.raises(ScheduleError, match=f"did you mean {meant}"):
        build(given, ranks=2, microbatches=4)
    for setting in (f"pipeline.schedule={given}", f"draw.compare=[{given}]"):
        with pytest.raises(ConfigError, match=f"did you mean {meant}"):
            check_config(compose_config([setting]), 1)


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [
        ("24GB", 24e9),
        ("1.5 GiB", 1.5 * 2**30),
        ("16e9", 16e9),
        ("512m", 512e6),
        (7, 7),
        (None, None),
    ],
)
def test_sizes_may_have_units(given, bytes_):
    given = "null" if given is None else repr(given)
    assert compose_config([f"pipeline.memory_bytes={given}"]).pipeline.memory_bytes == bytes_


def test_pipeline_accepts_names_in_any_spelling():
    from torch import nn

    layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    pipe = Pipeline(
        layers, nn.functional.mse_loss, stages=1, microbatches=2, schedule="1F1B", precision="BF16"
    )
    assert (pipe.schedule.name, pipe.precision) == ("one_f_one_b", "bfloat16")
    assert compose_config(["train.precision=bf16"]).train.precision == "bfloat16"
